SINKS = {
    "wandb": "silva.monitoring.sinks.settings:WandbSettings",
    "mlflow": "silva.monitoring.sinks.settings:MlflowSettings",
    "trackio": "silva.monitoring.sinks.settings:TrackioSettings",
    "prometheus": "silva.monitoring.sinks.settings:PrometheusSettings",
    "jsonl": "silva.monitoring.sinks.settings:JsonLinesSettings",
}
