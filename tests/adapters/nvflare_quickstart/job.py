"""The job, in NVFlare's simulator."""

from model import Net
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv

if __name__ == "__main__":
    recipe = FedAvgRecipe(
        name="quickstart",
        model=Net(),
        min_clients=2,
        num_rounds=3,
        train_script="client.py",
    )
    recipe.execute(SimEnv(num_clients=2, workspace_root="workspace"))
