"""Compiled loops of the fitter: one group after another, each from its own observations alone.

Every family is a location-scale family of y = ln x, or close to it, so one solver serves them all:

| family | code | y | second parameter s |
|---|---|---|---|
| log-t, log-normal (nu = inf) | LOG_T | mu + sigma T, T ~ Student-t(nu) | ln sigma |
| Weibull, exponential (sigma = 1) | WEIBULL | ln scale + sigma W, W ~ ln Exp(1), sigma = 1 / shape | ln sigma |
| gamma | GAMMA | m = ln mean, shape a | ln cv = -ln(a) / 2 |

The numbers below are the codes the kernels branch on.
"""

LOG_T = 0
WEIBULL = 1
GAMMA = 2
