ENGINES = {
    "http": "silva.engines.http_settings:HttpEngineSettings",
    "local": "silva.engines.settings:LocalEngineSettings",
    "openai": "silva.engines.openai_settings:OpenAIEngineSettings",
    "vllm": "silva.engines.vllm_settings:VllmEngineSettings",
}
