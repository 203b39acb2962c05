PLACEMENTS = {
    "local": "silva.placement.settings:LocalPlacementSettings",
    "services": "silva.placement.settings:ServicesPlacementSettings",
}
