"""The telling lines of published chat templates: what `auto` knows a family by. One line a template."""

# ruff: noqa: E501

from __future__ import annotations

# Family, which template, excerpt, added tokens.
TEMPLATES: list[tuple[str, str, str, tuple[str, ...]]] = [
    ("llama", "Llama 3.1", """{{- "<|python_tag|>" + tool_call.name + ".call(" }}{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- "<|start_header_id|>ipython<|end_header_id|>" }}""", ("<|python_tag|>", "<|eom_id|>")),
    ("llama", "Llama 3.2", """{{- "Environment: ipython\\n" }}{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}. ' }}""", ()),
    ("pythonic", "Llama 3.2 pythonic", "{{- 'you MUST put it in the format of [func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]' }}{{- 'ipython' }}", ()),
    ("pythonic", "Llama 4 pythonic", "- Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]", ()),
    ("pythonic", "LFM2", """{{- "List of tools: <|tool_list_start|>[" }}""", ()),
    ("pythonic", "LFM2.5", "{{- bos_token -}}", ("<|tool_call_start|>", "<|tool_call_end|>")),
    ("mistral_v3", "Mistral 7B v0.3", """{{- "[TOOL_CALLS] [" }}{{- ', "id": "' + tool_call.id + '"}' }}""", ("[TOOL_CALLS]",)),
    ("mistral", "Mistral Small 3.2", """{{- "[TOOL_CALLS]" + name + "[CALL_ID]" + id + "[ARGS]" + arguments }}""", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", "Mistral without a template of tools", "[INST]", ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    ("deepseek_v3", "DeepSeek V3", "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + '```json' + '\\n'}}", ()),
    ("deepseek_v31", "DeepSeek V3.1", "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>' + tool['function']['arguments'] + '<｜tool▁call▁end｜>'}}", ()),
    ("deepseek_v32", "DeepSeek V3.2", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="{name}">', ()),
    ("deepseek_v32", "DeepSeek V3.2 without a template of tools", "<｜User｜>", ("｜DSML｜", "<｜tool▁calls▁begin｜>")),
    ("glm", "GLM 4.5", "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>", ("<tool_call>",)),
    ("glm", "GLM 4.7", "{{- '<tool_call>' + tc.name -}}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>", ("<tool_call>", "<arg_key>")),
    ("longcat", "LongCat Flash", '<longcat_tool_call>{"name": <function-name>, "arguments": <args-dict>}</longcat_tool_call>', ()),
    ("longcat", "LongCat with tags", "<longcat_tool_call>{function-name}\n<longcat_arg_key>{arg-key-1}</longcat_arg_key>", ()),
    ("kimi_k2", "Kimi K2", "{%- macro render_toolcalls(message) -%}<|tool_calls_section_begin|>{%- for tool_call in message['tool_calls'] -%}<|tool_call_begin|>{{ tool_call['id'] }}<|tool_call_argument_begin|>", ()),
    ("kimi_k2", "Kimi K2, first template", "<|im_system|>tool_declare<|im_middle|>{{- tools | tojson -}}", ("<|tool_calls_section_begin|>",)),
    ("minimax_m2", "MiniMax M2", "{%- set toolcall_begin_token = '<minimax:tool_call>' -%}<invoke name=\"tool-name-1\">\n<parameter name=\"param-key-1\">param-value-1</parameter>", ()),
    ("harmony", "gpt-oss", '{{- "<|start|>assistant to=" }}{{- "functions." + tool_call.name + "<|channel|>commentary " }}{{- "<|message|>" }}', ("<|channel|>", "<|message|>", "<|call|>")),
    ("gemma4", "Gemma 4", "{{- '<|tool_call>call:' + function['name'] + '{' -}}{{- '}<tool_call|>' -}}", ("<|tool_call>", "<tool_call|>")),
    ("function_gemma", "FunctionGemma", "{{- '<start_function_call>call:' + function['name'] + '{' -}}<escape>", ()),
    ("granite", "Granite 3.3", """{{- "When a tool is required, respond with <|tool_call|> followed by a JSON list of tools used." }}{{- '<|start_of_role|>' }}""", ("<|tool_call|>",)),
    ("granite", "Granite 20b function calling", "<|function_call_library|>", ()),
    ("phi4_mini", "Phi-4-mini", "{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}", ("<|tool_call|>", "<|/tool_call|>")),
    ("phi4_mini", "Phi-4-mini with functools", "a single JSON list formatted as functools[{\"name\": [function name], \"arguments\": [function arguments as JSON]}, ...]", ()),
    ("xlam", "xLAM 2", "You are a helpful assistant. You are developed by Salesforce xLAM team.", ()),
    ("xlam", "xLAM with another system prompt", '[{"name": "tool_call_name", "arguments": {"arg1": "value1"}}, ...]', ()),
    ("step", "Step 3.5", "You have access to the following functions in JSONSchema format:\\n\\n<tools><tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>", ("<tool_call>",)),
    ("step", "Step 3", '<steptml:invoke name="tool_name"><steptml:parameter name="arg">', ()),
]  # fmt: skip
