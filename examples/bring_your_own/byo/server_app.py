"""The server: Flower's own, but for one line."""

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import ServerApp

from byo.task import Digits
from flower_adsp import Adsp, DSparsePlan

app = ServerApp()


@app.main()
def main(grid, context):
    """Train, and print how it went."""
    task = Digits()
    model = task.build_model()

    def evaluate(server_round, arrays):
        model.load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord(task.metrics(model, task.held_out_data("validation")))

    strategy = Adsp(check_period=30.0, plan=DSparsePlan(task))  # was: FedAvg()
    result = strategy.start(
        grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=context.run_config["num-rounds"],
        train_config=ConfigRecord({"lr": 0.1}),
        evaluate_fn=evaluate,
    )
    last = result.evaluate_metrics_serverapp[context.run_config["num-rounds"]]
    print(f"accuracy {last['accuracy']:.3f}")
