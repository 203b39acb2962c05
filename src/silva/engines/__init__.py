ENGINES = {
    "local": "silva.engines.settings:LocalEngineSettings",
    "http": "silva.engines.http_settings:HttpEngineSettings",
    "vllm": "silva.engines.vllm_settings:VllmEngineSettings",
    "openai": "silva.engines.openai_settings:OpenAIEngineSettings",
}
