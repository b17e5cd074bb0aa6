"""The ClientApp of the main job."""

from flwr.clientapp import ClientApp

from flower_adsp.clients import register

app = ClientApp()
register(app)
