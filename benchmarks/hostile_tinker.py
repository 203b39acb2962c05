"""An OpenAPI document of the JSON routes of a Tinker server, which has none of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from silva.server.openapi import document
from silva.server.parsing import Body
from silva.server.tinker import bodies
from silva.server.tinker.routes import REFUSED

POSTED: Mapping[str, type[Body]] = {
    "create_session": bodies.SessionBody,
    "session_heartbeat": bodies.HeartbeatBody,
    "sessions/search": bodies.SearchBody,
    "sessions/{id}/finish": bodies.FinishBody,
    "create_model": bodies.CreateBody,
    "optim_step": bodies.OptimBody,
    "save_weights": bodies.SaveBody,
    "save_weights_for_sampler": bodies.SamplerBody,
    "save_weights_external": bodies.ExternalBody,
    "load_weights": bodies.LoadWeightsBody,
    "create_sampling_session": bodies.SamplingSessionBody,
    "asample": bodies.SampleBody,
    "get_info": bodies.InfoBody,
    "weights_info": bodies.WeightsBody,
    "retrieve_future": bodies.FutureBody,
    "cancel_future": bodies.FutureBody,
}
OF_ALL = ("client/config", "client/dynamic_config", "telemetry")  # any JSON
CHECKPOINT = "training_runs/{id}/checkpoints/{name}"
SHOWN = (
    "healthz", "get_server_capabilities", "training_runs", "training_runs/{id}", "checkpoints", "sessions",
    "training_runs/{id}/checkpoints", "sessions/{id}", "samplers/{id}", f"{CHECKPOINT}/external_weights_urls",
    "files/{token}",
)  # fmt: skip
CHANGED: Mapping[tuple[str, str], type[Body] | None] = {
    ("POST", f"{CHECKPOINT}/publish"): None,
    ("DELETE", f"{CHECKPOINT}/publish"): None,
    ("PUT", f"{CHECKPOINT}/ttl"): bodies.TtlBody,
    ("DELETE", CHECKPOINT): None,
}


def tinker_document(there: Mapping[str, str]) -> dict[str, Any]:
    """`there`: by names of fields, what exists."""
    routes: dict[tuple[str, str], tuple[type[Body] | None, str]] = {
        ("POST", f"/api/v1/{path}"): (body, path) for path, body in POSTED.items()
    }
    routes |= {("GET", f"/api/v1/{path}"): (None, path) for path in SHOWN}
    routes |= {("POST", f"/api/v1/{path}"): (Body, path) for path in OF_ALL}
    routes |= {(how, f"/api/v1/{path}"): (body, path) for (how, path), body in CHANGED.items()}
    routes |= {(how, f"/api/v1{path}"): (None, words) for (how, path), words in REFUSED.items()}
    found = document(routes, vocabulary=256)
    found["components"]["securitySchemes"] = {"key": {"type": "apiKey", "in": "header", "name": "X-API-Key"}}
    for schema in found["components"]["schemas"].values():
        for name in schema.get("properties", {}).keys() & there.keys():
            schema["properties"][name] = {"enum": [there[name], "none"]}
    return found
