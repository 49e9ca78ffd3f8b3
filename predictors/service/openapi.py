"""The description of the HTTP side, made from the messages themselves."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from google.rpc import status_pb2

from predictors.proto import predictor_v1_pb2 as pb
from predictors.service.json_messages import schemas

ERRORS = {
    "400": "A field is wrong; the message names it.",
    "401": "A known bearer token is needed.",
    "404": "No such artifact.",
    "429": "The queue is full; try again later.",
    "500": "The model failed.",
    "503": "Starting or draining.",
    "504": "The time was up before the prompt's turn came.",
}
BODY_ERRORS = {
    "408": {"description": "The body was not complete in time."},
    "413": {"description": "The body is too large."},
    "415": {"description": "The body's compression is neither gzip nor deflate."},
}
OIP_PATHS = {
    "/v2": ("get", "Server metadata"),
    "/v2/health/live": ("get", "Whether the server runs"),
    "/v2/health/ready": ("get", "Whether the server takes requests"),
    "/v2/models/{name}": ("get", "Model metadata"),
    "/v2/models/{name}/ready": ("get", "Whether the model takes requests"),
    "/v2/models/{name}/infer": ("post", "Inference on named tensors"),
    "/v2/models/{name}/versions/{version}": ("get", "Model metadata"),
    "/v2/models/{name}/versions/{version}/ready": ("get", "Whether the model takes requests"),
    "/v2/models/{name}/versions/{version}/infer": ("post", "Inference on named tensors"),
}


def openapi() -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    paths: dict[str, Any] = {
        "/v1/predict": _post("Predict for one prompt", "PredictRequest", "PredictResponse"),
        "/v1/predict-batch": _post(
            "Predict for many prompts, each with its own outcome",
            "PredictBatchRequest",
            "PredictBatchResponse",
        ),
        "/v1/metadata": {
            "get": {
                "summary": "What is served",
                "parameters": [{"name": "artifact_id", "in": "query", "schema": {"type": "string"}}],
                "responses": {"200": _json("What is served", "GetMetadataResponse"), **_errors("404")},
            }
        },
        "/metrics": _get("Numbers for Prometheus"),
        "/healthz": _get("Whether the server runs"),
        "/readyz": _get("Whether the server takes requests"),
    }
    for path, (verb, summary) in OIP_PATHS.items():
        names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        parameters = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
        document: dict[str, Any] = {
            "summary": f"Open Inference Protocol: {summary}",
            "parameters": parameters,
        }
        if verb == "post":
            content = {"application/json": {"schema": {"type": "object"}}}
            document["requestBody"] = {"required": True, "content": content}
        paths[path] = {verb: document | {"responses": {"200": {"description": summary}}}}
    kinds = (pb.PredictBatchRequest, pb.PredictBatchResponse, pb.GetMetadataResponse)
    status = {
        "type": "object",
        "properties": {
            "code": {"type": "integer"},
            "message": {"type": "string"},
            "details": {"type": "array", "items": {"type": "object"}},
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tailcast prediction service",
            "version": metadata.version("tailcast"),
            "description": "How long an LLM's answer will be, before its first token. Fields: predictor_v1.proto.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas(*kinds) | {status_pb2.Status.DESCRIPTOR.name: status},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _json(description: str, schema: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {"description": description, "content": content}


def _errors(*codes: str) -> dict[str, Any]:
    return {code: _json(ERRORS[code], "Status") for code in codes}


def _post(summary: str, request: str, response: str) -> dict[str, Any]:
    body = {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{request}"}}},
    }
    responses = {"200": _json(summary, response), **_errors(*ERRORS), **BODY_ERRORS}
    return {"post": {"summary": summary, "requestBody": body, "responses": responses}}


def _get(summary: str) -> dict[str, Any]:
    return {"get": {"summary": summary, "responses": {"200": {"description": summary}}}}
