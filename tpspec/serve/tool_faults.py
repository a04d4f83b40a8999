"""What a client is told of a function whose calls cannot be bound to its schema."""

from __future__ import annotations

from tpspec.serve.errors import ApiError, bad_request

NO_OBJECT = "parameters should be the schema of an object"


def fault_of(name: str, fault: str) -> ApiError:
    return bad_request(f"tools: {name}: {fault}", "tools", "invalid_value")


def unbound(name: str, fault: ValueError) -> ApiError:
    advice = "leave it out, or let the function not be strict"
    return fault_of(name, f"{fault}: no call can be bound to that as this model writes them; {advice}")
