"""Proofs by which two ends of a connection show that they know the token, without sending it.

Each sends a nonce of its own, and then an HMAC of both nonces under the token: challenge and
response as in RFC 2195, in both directions. A listener learns nothing that could be used again.
"""

import hmac
import secrets


def make_nonce() -> str:
    """Return a number that was never used before."""
    return secrets.token_hex(16)


def proof(token: str, part: str, leader_nonce: str, host_nonce: str) -> str:
    """Return a proof that its sender knows the token.

    It holds the part of the sender, "leader" or "host", so that neither can send back the other's
    proof, and the nonces that both have made for this connection.
    """
    text = f"jdp {part} {leader_nonce} {host_nonce}"
    return hmac.new(token.encode(), text.encode(errors="replace"), "sha256").hexdigest()


def is_proof(given: object, *expected: str) -> bool:
    """Whether `given` is `proof(*expected)`, in a time that does not depend on the difference."""
    # JSON can hold surrogates, which UTF-8 cannot; they must not end the run.
    given = given.encode(errors="replace") if isinstance(given, str) else b""
    return hmac.compare_digest(given, proof(*expected).encode())
