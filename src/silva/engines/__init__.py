ENGINES = {
    "local": "silva.engines.settings:LocalEngineSettings",
    "http": "silva.engines.remote.settings:HttpEngineSettings",
    "vllm": "silva.engines.vllm.settings:VllmEngineSettings",
    "tinker": "silva.engines.tinker.settings:TinkerEngineSettings",
    "openai": "silva.actors.settings:OpenAIEngineSettings",
    "anthropic": "silva.actors.settings:AnthropicEngineSettings",
}
