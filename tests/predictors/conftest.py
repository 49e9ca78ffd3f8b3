import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from predictors.hosting.logs import set_up_logs
from tests.predictors.fakes import write_artifact, write_rich_artifact


@pytest.fixture(scope="session")
def artifact_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid tiny artifact; tests must not write into it."""
    return write_artifact(tmp_path_factory.mktemp("artifacts") / "tiny")


@pytest.fixture(scope="session")
def rich_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with all heads, conditioned; tests must not write into it."""
    return write_rich_artifact(tmp_path_factory.mktemp("artifacts") / "rich")


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of PEM files: authorities "ours" and "theirs", and certificates that they have signed."""
    trustme = pytest.importorskip("trustme")
    folder = tmp_path_factory.mktemp("pki")
    for authority in ("ours", "theirs"):
        issuer = trustme.CA()
        issuer.cert_pem.write_to_path(str(folder / f"{authority}.pem"))
        for name, host in (("server", "localhost"), ("client", "a.client")):
            certificate = issuer.issue_cert(host)
            certificate.private_key_pem.write_to_path(str(folder / f"{authority}-{name}.key"))
            for pem in certificate.cert_chain_pems:
                pem.write_to_path(str(folder / f"{authority}-{name}.pem"), append=True)
    return folder


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What a handler of the root logger writes that is protected as those of servers are."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    root = logging.getLogger()
    filters = {one: list(one.filters) for one in root.handlers}
    root.addHandler(handler)
    set_up_logs("text")
    yield stream
    root.removeHandler(handler)
    for one, before in filters.items():
        one.filters[:] = before
