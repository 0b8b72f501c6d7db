"""The APIs that agents speak, each in a file: how its requests are read into `Request` and its answers written from
`Call`."""

from turntree.gateway.dialects import chat, messages, responses
from turntree.gateway.dialects.common import Dialect as Dialect

OF_MESSAGES = "/v1/messages"
DIALECTS = {"/v1/chat/completions": chat.DIALECT, "/v1/responses": responses.DIALECT, OF_MESSAGES: messages.DIALECT}
