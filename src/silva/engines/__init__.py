ENGINES = {
    "local": "silva.engines.settings:LocalEngine",
    "openai": "silva.engines.openai_settings:OpenAIEngineSettings",
}
