"""The most of everything that a request may hold. What the engine itself limits (stop strings, biases …) is in
`llmkit.requests.sampling_params`."""

MAX_DEPTH = 128
"""Levels of lists and objects in a body."""

MAX_PROMPTS = 2048
"""Prompts of one completion request; inputs of one request for embeddings."""

MAX_MESSAGES = 4096
MAX_ITEMS = MAX_MESSAGES
"""Items of the input of a response, and of all that went before."""

MAX_TOOLS = 256
MAX_DOCUMENTS = 1024
MAX_TEMPLATE_CHARS = 65_536
MAX_USER_CHARS = 512
MAX_TOKENIZE_CHARS = 8 * 2**20
MAX_DETOKENIZE_IDS = 2**20

MAX_FIELDS_NAMED = 16
"""Unknown fields that the response's header and the log name."""

BODY_TIMEOUT_S = 60.0
"""How long a client may take to send a body."""

MAX_HEAD_BYTES = 262_144
"""Request line and headers together."""

MAX_URL_BYTES = 65_535
"""Path and query together; the parser of HTTP takes no more."""

HEAD_TIMEOUT_S = 60.0
"""How long a client may take to send them, from the connection or from their first byte after an answer."""

READER_TIMEOUT_S = 120.0
"""How long a client may read nothing while an answer waits for it, before its request is given up."""

MAX_CLIENTS = 10_000
"""Clients whose rate is remembered; the longest unseen is forgotten first."""

MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512
