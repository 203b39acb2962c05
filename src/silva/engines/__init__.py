ENGINES = {
    "local": "silva.engines.settings:LocalEngineSettings",
    "openai": "silva.engines.openai_settings:OpenAIEngineSettings",
}
