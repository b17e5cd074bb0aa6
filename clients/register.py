"""Teach a ClientApp the messages of this project."""

from flower_adsp.clients.capability import handle_capability
from flower_adsp.clients.commit import handle_commit
from flower_adsp.clients.stock import handle_evaluate, handle_train
from flwr.clientapp import ClientApp

from flower_adsp.messages import QUERY_CAPABILITY, TRAIN_COMMIT


def register(app: ClientApp) -> ClientApp:
    """Register all handlers with `app`, and return it.

    It then answers assignments and capability queries, and Flower's own ``train`` and
    ``evaluate`` messages as well.
    """
    app.train()(handle_train)
    app.train(TRAIN_COMMIT.partition(".")[2])(handle_commit)
    app.evaluate()(handle_evaluate)
    app.query(QUERY_CAPABILITY.partition(".")[2])(handle_capability)
    return app
