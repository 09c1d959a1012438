import dataclasses
import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


@dataclasses.dataclass(kw_only=True)
class Authority:
    folder: Path
    name: str = "ca"

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        names = _named(self.name)
        self._names = names
        built = (
            self._builder(self._key, names, datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(True, None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.path = self._write(f"{self.name}.pem", built)

    def issue(
        self,
        name: str = "task",
        *,
        valid: datetime.timedelta = datetime.timedelta(days=1),
        begins: datetime.timedelta = datetime.timedelta(days=-2),
        password: bytes | None = None,
        purposes: tuple[x509.ObjectIdentifier, ...] = (),
        ca: Path | None = None,
    ) -> str:
        """Writes a certificate and its key; returns what KERASDIST_TLS is set to."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(key, _named(name), valid, begins)
        if purposes:
            builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), False)
        path = self._write(
            f"{self.name}-{name}.pem", builder.sign(self._key, hashes.SHA256())
        )
        encryption = (
            serialization.BestAvailableEncryption(password)
            if password
            else serialization.NoEncryption()
        )
        key_path = self.folder / f"{self.name}-{name}.key"
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                encryption,
            )
        )
        return f"{path},{key_path},{ca or self.path}"

    def server_only(self) -> str:
        """As `issue`: a certificate that a side that connects can't use."""
        return self.issue("server", purposes=(ExtendedKeyUsageOID.SERVER_AUTH,))

    def _builder(
        self,
        key: ec.EllipticCurvePrivateKey,
        names: x509.Name,
        valid: datetime.timedelta,
        begins: datetime.timedelta = datetime.timedelta(days=-2),
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(names)
            .issuer_name(self._names)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + begins)
            .not_valid_after(now + valid)
        )

    def _write(self, name: str, certificate: x509.Certificate) -> Path:
        path = self.folder / name
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return path


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
