"""The secret by which the processes of a run know one another.

Both ends show that they know it, by a keyed digest of a number that the other end
chose: the secret itself never crosses the network. What is said afterwards is neither
encrypted nor signed.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

NONCE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Secret:
    """What only the processes of a run know, or should.

    Args:
        source: Where the key is from, for messages.
        is_private: False if others can guess the key.
    """

    key: bytes = field(repr=False)
    source: str
    is_private: bool = True

    def proof(self, *parts: str) -> str:
        """What only someone with the key can make of the parts."""
        text = "\0".join(parts).encode()
        return hmac.new(self.key, text, hashlib.sha256).hexdigest()

    def proves(self, proof: object, *parts: str) -> bool:
        """Whether a proof, as it came from the network, is that of the parts."""
        found = proof.encode() if isinstance(proof, str) else b""
        return hmac.compare_digest(found, self.proof(*parts).encode())


def nonce() -> str:
    """A number that is used once."""
    return secrets.token_hex(NONCE_BYTES)
