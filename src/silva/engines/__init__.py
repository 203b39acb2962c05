ENGINES = {"local": "silva.engines.settings:LocalEngine"}
