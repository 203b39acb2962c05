TRAINERS = {
    "local": "silva.trainer.settings:LocalTrainerSettings",
    "tinker": "silva.trainer.settings:TinkerTrainerSettings",
}
