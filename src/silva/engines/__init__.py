ENGINES = {"local": "silva.engines.settings:LocalEngineSettings"}
