TRAINERS = {"local": "silva.trainer.settings:LocalTrainerSettings"}
