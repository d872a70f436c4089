"""Table one of a session, from the files of a stopped coordinator or from one that runs."""

from contextlib import closing

from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.core.vocabulary.keys import TABLE_ONE
from xain_coordinator.inspection.client import description
from xain_coordinator.journal.restore import open_stopped
from xain_coordinator.ports import KeyNotFound
from xain_coordinator.stores.journalled import store_of_session
from xain_coordinator.stores.opening import open_store
from xain_workloads.errors import NoModel
from xain_workloads.tables.checks.describe import TableOne

_NONE = "the data are described when the first model is made of them, and there is none yet"


def table_one(config: CoordinatorConfig, address: str | None) -> TableOne:
    """The description of the data of the latest session. Raises NoModel, NoStatus, JournalError,
    StoreError and DataError."""
    text = _from_files(config) if address is None else description(address)
    if not text:
        raise NoModel(_NONE)
    return TableOne.from_json(text)


def _from_files(config: CoordinatorConfig) -> str:
    """The description as JSON, from the store of a stopped coordinator; "" if there is none. Raises
    JournalError and StoreError."""
    with (
        open_stopped(config.journal.path) as (journal, last),
        closing(open_store(config.storage)) as opened,
    ):
        store = store_of_session(opened, journal, last.session.session_id)
        try:
            with store.open(TABLE_ONE) as reader:
                return reader.read(0, reader.size).decode()
        except KeyNotFound:
            return ""
