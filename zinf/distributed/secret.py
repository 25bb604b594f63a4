"""The secret by which the processes of a run recognize one another.

Each end of a connection proves that it knows the secret by a keyed digest of a number
that the other end chose. The secret itself never crosses the network. Messages after
the greeting are neither encrypted nor signed.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

NONCE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Secret:
    """The key that all processes of a run share.

    Args:
        source: Where the key comes from, in words for messages.
        is_private: False if other users can guess the key.
    """

    key: bytes = field(repr=False)
    source: str
    is_private: bool = True

    def proof(self, *parts: str) -> str:
        """The keyed digest (HMAC-SHA256) of the parts."""
        text = "\0".join(parts).encode()
        return hmac.new(self.key, text, hashlib.sha256).hexdigest()

    def proves(self, proof: object, *parts: str) -> bool:
        """Whether `proof`, which came from the network, equals `self.proof(*parts)`."""
        found = proof.encode() if isinstance(proof, str) else b""
        return hmac.compare_digest(found, self.proof(*parts).encode())


def nonce() -> str:
    """A random number that is used once, as hexadecimal text."""
    return secrets.token_hex(NONCE_BYTES)
