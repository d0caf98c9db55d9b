"""Fields that clients of other servers send, and that mean nothing here: accepted without effect, or refused.

Such a field is accepted if it cannot change the content of an answer. It is a hint, a label, something about
billing, storage or routing, or the neutral value of an unsupported feature. Other values are refused by name.
The fields are from OpenAI's API, vLLM, SGLang, LiteLLM, OpenRouter, llama.cpp, LM Studio, Ollama and mlx-lm.
"""

from __future__ import annotations

from mlxrun.api.body_schema import ANY, BOOL, LIST, OBJECT, STRING, Accepted, Schema

_INTEGER: Schema = {"type": "integer"}
_NUMBER: Schema = {"type": "number"}
_STRINGS: Schema = {"type": ["string", "array"]}
_EMPTY: Schema = {"enum": [[], {}]}
_OFF: Schema = {"const": False}
_ON: Schema = {"const": True}

_NOTHING = "it asks for nothing"
_LABEL = "a label of the request"
_CACHE = "a hint; the prefix cache compares tokens, and the config decides how long it keeps them"
_SPEED = "it may make an answer faster, but never changes it"
_ONE_MODEL = "there is one model, and no routing"
_ONE_ENGINE = "there is one engine"
_RETRIES = "the client's own retries and time limits"
_BEAMS = "there is no beam search"
_DETAILS = "the details are not returned"
_MEDIA = "the model's files configure image processing"
_SAMPLER = "this sampler is not implemented"

# Of both endpoints, chat/completions and completions.
COMPLETION_IGNORED: Accepted = {
    # OpenAI
    "metadata": (OBJECT, _LABEL),
    "prediction": (OBJECT, _SPEED),
    "prompt_cache_key": (STRING, _CACHE),
    "prompt_cache_options": (OBJECT, _CACHE),
    "prompt_cache_retention": (STRING, _CACHE),
    "safety_identifier": (STRING, _LABEL),
    "service_tier": (STRING, "there is only one service tier"),
    "store": (BOOL, "completions are not stored"),
    "stream_options.include_obfuscation": (BOOL, "streams are not obfuscated"),
    "verbosity": (STRING, "a hint that no chat template has; ask for the length in the prompt"),
    # vLLM
    "bad_words": (_EMPTY, _NOTHING),
    "best_of": ({"const": 1}, "candidates are not compared"),
    "early_stopping": (_OFF, _BEAMS),
    "ec_transfer_params": (_EMPTY, _ONE_ENGINE),
    "guided_decoding_backend": (STRING, "there is only one backend"),
    "kv_transfer_params": (_EMPTY, _ONE_ENGINE),
    "length_penalty": ({"const": 1}, _BEAMS),
    "logits_processors": (_EMPTY, "code in requests is not run"),
    "media_io_kwargs": (_EMPTY, _MEDIA),
    "mm_processor_kwargs": (_EMPTY, _MEDIA),
    "request_id": (STRING, "mlxrun assigns the ids"),
    "return_mm_kwargs": (BOOL, "it is for vLLM's render endpoints"),
    "return_token_offsets": (BOOL, "it is for vLLM's render endpoints"),
    "routed_experts_prompt_start": (_INTEGER, "routed experts are not returned"),
    "session_id": (STRING, _LABEL),
    "spaces_between_special_tokens": (BOOL, "special tokens are never part of the text"),
    "stream_interval": (_INTEGER, "every step's tokens are sent at once"),
    "truncation_side": (STRING, "prompts are not truncated"),
    "use_beam_search": (_OFF, _BEAMS),
    "vllm_xargs": (_EMPTY, "there are no extensions"),
    "watermarking": (_OFF, "answers have no watermark"),
    # SGLang
    **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room"), (ANY, _ONE_ENGINE)),
    "custom_labels": (OBJECT, _LABEL),
    "custom_params": (_EMPTY, "code in requests is not run"),
    **dict.fromkeys(("data_parallel_rank", "disagg_prefill_dp_rank", "routed_dp_rank"), (ANY, _ONE_ENGINE)),
    "ngram_corpus_id": (_STRINGS, _SPEED),
    "no_stop_trim": (_OFF, "stop strings are never part of an answer"),
    "return_cached_tokens_details": (BOOL, _DETAILS),
    "return_hidden_states": (_OFF, _DETAILS),
    "return_routed_experts": (_OFF, _DETAILS),
    "rid": (_STRINGS, "mlxrun assigns the ids"),
    "routed_experts_start_len": (_INTEGER, "routed experts are not returned"),
    "session_params": (_EMPTY, "send the whole conversation"),
    # OpenRouter
    "cache_control": (OBJECT, _CACHE),
    "debug": (OBJECT, "it is for developers of OpenRouter"),
    "models": (LIST, _ONE_MODEL),
    "plugins": (_EMPTY, "there are no plugins"),
    "provider": (OBJECT, _ONE_MODEL),
    "route": (STRING, _ONE_MODEL),
    "trace": (OBJECT, _LABEL),
    "transforms": (LIST, "a prompt that does not fit is refused, not compressed"),
    "usage": (OBJECT, "token counts are always returned"),
    # LiteLLM
    **dict.fromkeys(("additional_drop_params", "allowed_openai_params", "drop_params"), (ANY, _ONE_MODEL)),
    "api_version": (STRING, _ONE_MODEL),
    "caching": (BOOL, "finished answers are not cached"),
    "context_management": (_EMPTY, "the client manages the context"),
    "custom_llm_provider": (STRING, _ONE_MODEL),
    "extra_headers": (OBJECT, "headers are not part of a body"),
    "include_server_side_tool_invocations": (_OFF, "there are no server tools"),
    "litellm_metadata": (OBJECT, _LABEL),
    **dict.fromkeys(("litellm_call_id", "litellm_session_id", "litellm_trace_id"), (STRING, _LABEL)),
    **dict.fromkeys(("max_retries", "num_retries", "request_timeout", "timeout"), (_NUMBER, _RETRIES)),
    "tags": (LIST, _LABEL),
    # llama.cpp, LM Studio, Ollama, mlx-lm
    "cache_prompt": (BOOL, _CACHE),
    "draft_model": (STRING, _SPEED),
    "id_slot": (_INTEGER, "rows are assigned by the scheduler"),
    "keep_alive": (ANY, "the model stays loaded"),
    "num_ctx": (_INTEGER, "the config sets the context"),
    "num_draft_tokens": (_INTEGER, _SPEED),
    "return_progress": (BOOL, "a stream's comments have the progress"),
    "timings_per_token": (BOOL, _DETAILS),
    "ttl": (_NUMBER, "the model stays loaded"),
    **dict.fromkeys(("repeat_penalty", "tfs_z", "typical_p"), ({"const": 1}, _SAMPLER)),
    **dict.fromkeys(
        ("dry_multiplier", "dynatemp_range", "mirostat", "top_a", "xtc_probability"), ({"const": 0}, _SAMPLER)
    ),
    **dict.fromkeys(
        (
            *("dry_allowed_length", "dry_base", "dry_penalty_last_n", "dynatemp_exponent"),
            *("mirostat_eta", "mirostat_tau", "xtc_threshold"),
        ),
        (_NUMBER, "it acts only with a sampler that is not implemented"),
    ),
}
CHAT_IGNORED: Accepted = COMPLETION_IGNORED | {
    "documents": (_EMPTY, _NOTHING),
    "echo": (_OFF, _NOTHING),
    "function_call": ({"enum": ["none", "auto"]}, _NOTHING),
    "functions": (_EMPTY, _NOTHING),
    "reasoning.summary": (STRING, "reasoning is returned whole, and is not summarized"),
    "return_meta_info": (_OFF, _DETAILS),
    "return_prompt_text": (_OFF, "see /tokenize"),
    "return_prompt_token_ids": (_OFF, "see /tokenize"),
    "separate_reasoning": (_ON, "reasoning is always returned separately"),
    "stream_reasoning": (BOOL, "reasoning is streamed as it is computed"),
    "use_audio_in_video": (BOOL, "the sound of videos is not used; send it as audio"),
}

# Known fields of other servers that would change the answer, and the reason.
REFUSED_OF_OTHERS = {
    "adapters": "name one of model.adapters in `model`, as MODEL:NAME",
    "custom_logit_processor": "code in requests is not run",
    "ebnf": "use structured_outputs.grammar",
    "extra_key": "the prefix cache is shared by all requests",
    "images_config": _MEDIA,
    "logprob_token_ids": "logprobs are those of the likeliest tokens; see top_logprobs",
    "lora_path": "name one of model.adapters in `model`, as MODEL:NAME",
    "max_dynamic_patch": _MEDIA,
    "min_dynamic_patch": _MEDIA,
    "preset": "there are no presets",
    "prompt_embeds": "send text or tokens",
    "regex": "use structured_outputs.regex",
    "repetition_context_size": "penalties count all tokens",
    "repetition_detection": "repetitions do not end an answer",
    "role_mapping": "the chat template writes the roles",
    "stop_regex": "use stop",
}
REFUSED_OF_OTHER_CHATS = REFUSED_OF_OTHERS | {
    "image_config": "only text output is supported",
    "input_ids": "use /v1/completions",
    "json_schema": "use response_format",
    "task": "send the instruction in a message",
}
