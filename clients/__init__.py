"""The device half: handlers that a ClientApp registers."""

from flower_adsp.clients.register import register

__all__ = ["register"]
