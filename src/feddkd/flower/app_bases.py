"""Flower's two apps without what they do: that lies floors above the engines, and is given to them."""

from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from feddkd.flower.messages import (
    NodeStorage,
    Page,
    bound,
    bytes_in,
    page_of,
    page_record,
    tensor_record,
)

Kept = dict[str, bytes]  # tag -> groups
PATIENCE = 60.0  # seconds for a SuperLink that does not answer


class Answering(ClientApp):
    """Answers query.<what>, train.<phase>, evaluate.

    Which phases there are is the method's business, so none is registered.
    """

    def __call__(self, message: Message, context: Context) -> Message:
        shelf, page = NodeStorage(context), page_of(message)
        category, _, what = message.metadata.message_type.partition(".")
        if category == "query":
            told, kept = self.ask(context, what, page, shelf.read())
            shelf.write(kept)
            return Message(RecordDict({"page": page_record(told)}), reply_to=message)
        answered, content, kept = self.respond(
            context, page, bytes_in(message.content), shelf.read()
        )
        shelf.write(kept)
        return Message(
            RecordDict({"page": page_record(answered), "tensors": tensor_record(content)}),
            reply_to=message,
        )

    def ask(self, context: Any, what: str, page: Page, kept: Kept) -> tuple[Page, Kept]:
        """A question besides an exchange -> (what is told, what is kept)."""
        raise NotImplementedError

    def respond(
        self, context: Any, page: Page, sent: bytes, kept: Kept
    ) -> tuple[Page, bytes, Kept]:
        """A client's part in an exchange -> (page, tensors, what is kept)."""
        raise NotImplementedError


def serving(serve: Callable[[Grid, Mapping[str, Any]], None]) -> ServerApp:
    """A ServerApp that does this, with Flower's Grid and the run's configuration."""
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        bound(grid, PATIENCE)
        serve(grid, context.run_config)

    return server
