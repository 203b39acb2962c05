PLACEMENTS = {"local": "silva.placement.settings:LocalPlacementSettings"}
