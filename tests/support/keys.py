"""Keys for tests of signatures, as PEM."""

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)


def pair(seed=1, password=None):
    """Return a private and a public key, the same for the same seed."""
    return private_pem(Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32), password)


def private_pem(key, password=None):
    """Return a key of any kind and its public key."""
    encryption = BestAvailableEncryption(password) if password else NoEncryption()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
    return private, key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


PRIVATE, PUBLIC = pair()
OTHER_PRIVATE, OTHER_PUBLIC = pair(2)
