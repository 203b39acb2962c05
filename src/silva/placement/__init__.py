PLACEMENTS = {
    "local": "silva.placement.settings:LocalPlacementSettings",
    "ray": "silva.placement.settings:RayPlacementSettings",
    "services": "silva.placement.settings:ServicesPlacementSettings",
}
