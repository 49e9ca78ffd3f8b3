"""Many simulations: sweeps over settings, the highest load that meets a target, the best settings of a deployment."""
