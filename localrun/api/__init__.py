"""The dialects as pure functions, request body in, `messages` out and back. Knows neither the engine nor the store."""
