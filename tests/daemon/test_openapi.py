"""The OpenAPI document: every body is in it, every reference leads somewhere, and what it says is valid is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from localrun.api.fields import use_of
from localrun.api.routes import ROUTES
from tests.daemon.serving import Daemon


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


@pytest.fixture(scope="module")
def document(daemon: Daemon) -> dict[str, Any]:
    found: dict[str, Any] = daemon.http.get("/openapi.json").json()
    return found


def test_every_route_is_there(document: dict[str, Any]) -> None:
    for route in ROUTES:
        operation = document["paths"][route.path.replace(":path", "")][route.method.lower()]
        assert operation["summary"] == route.summary
        assert ("requestBody" in operation) == (route.body is not None or route.raw)


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    for reference in set(references(document)):
        value: Any = document
        for step in reference.removeprefix("#/").split("/"):
            value = value[step]
        assert value


def test_bodies_have_all_their_fields(document: dict[str, Any]) -> None:
    for route in ROUTES:
        if route.body is not None:
            properties = document["components"]["schemas"][route.body.__name__]["properties"]
            assert set(properties) == {wire for wire, _, _ in use_of(route.body).values()}
            assert all(field.get("description") for field in properties.values() if "$ref" not in field)


def test_the_page_is_served(daemon: Daemon) -> None:
    assert "openapi.json" in daemon.http.get("/docs").text
    assert json.dumps(daemon.http.get("/openapi.json").json())
