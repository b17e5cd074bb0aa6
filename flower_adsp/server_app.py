"""The ServerApp of the main job."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flower_adsp.config import load_config
from flower_adsp.experiment import run_experiment

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what the run config asks for."""
    run_experiment(grid, load_config(context.run_config))
