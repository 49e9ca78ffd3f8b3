"""Compiled loops of the fitter, which fit each group independently.

Every family is, exactly or nearly, a location-scale family of y = ln x, so one solver fits all of them:

| family | code | y | second parameter s |
|---|---|---|---|
| log-t, log-normal (nu = inf) | LOG_T | mu + sigma T, T ~ Student-t(nu) | ln sigma |
| Weibull, exponential (sigma = 1) | WEIBULL | ln scale + sigma W, W ~ ln Exp(1), sigma = 1 / shape | ln sigma |
| gamma | GAMMA | m = ln mean, shape a | ln cv = -ln(a) / 2 |

The constants below are the family codes of the kernels.
"""

LOG_T = 0
WEIBULL = 1
GAMMA = 2
