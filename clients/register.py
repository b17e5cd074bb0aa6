"""Teach a ClientApp the messages of this project."""

from flower_adsp.clients.capability import handle_capability
from flower_adsp.clients.commit import handle_commit
from flower_adsp.clients.stock import handle_evaluate, handle_train
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flower_adsp.messages import NO_SECAGG, QUERY_CAPABILITY, TRAIN_COMMIT


def register(app: ClientApp) -> ClientApp:
    """Register all handlers with `app`, and return it.

    It then answers assignments and capability queries, and Flower's own ``train`` and
    ``evaluate`` messages as well.
    """
    # SecAgg+ lets messages pass that it does not know, and they would not be secure.
    has_secagg = any("secagg" in getattr(mod, "__name__", "") for mod in app._mods)
    app.train()(handle_train)
    app.train(TRAIN_COMMIT.partition(".")[2])(_refuse if has_secagg else handle_commit)
    app.evaluate()(handle_evaluate)
    app.query(QUERY_CAPABILITY.partition(".")[2])(handle_capability)
    return app


def _refuse(message: Message, context: Context) -> Message:
    raise RuntimeError(NO_SECAGG)
