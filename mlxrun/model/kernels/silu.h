// In a kernel, `number` = silu(gate) * up. `gate` and `up` are float32 with numbers of T. Each operation is rounded.
  const float grown = float(T(1.0f + float(T(PRECISE_EXP(ABS(gate))))));
  const float part = float(T(1.0f / grown));
  const float sigmoid = gate < 0 ? part : float(T(1.0f - part));
  const T number = T(float(T(gate * sigmoid)) * up);
