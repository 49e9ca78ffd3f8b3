"""Access to predictors that are services: the same options wherever a predictor can be named."""

from dataclasses import dataclass

#: Options that are files.
ACCESS_FILES = ("predictor_ca", "predictor_cert", "predictor_key", "predictor_token_file")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAccess:
    """Files for the connection to predictors at grpcs://HOST:PORT, and at grpc://HOST:PORT on this machine; base class of
    configurations. A client reads them again when they have changed."""

    predictor_ca: str | None = None
    """PEM file with the CA of predictors at grpcs://; default: those of the system."""
    predictor_cert: str | None = None
    """PEM file with a client certificate for predictors at grpcs://, together with predictor_key; default: none."""
    predictor_key: str | None = None
    """PEM file with the private key of predictor_cert."""
    predictor_token_file: str | None = None
    """File with the bearer token for predictors at grpcs://; at grpc:// it is only sent to this machine. Default: none."""

    @property
    def access_files(self) -> list[str]:
        """The files that are set."""
        return [path for name in ACCESS_FILES if (path := getattr(self, name)) is not None]


NO_FILES = ServiceAccess()
