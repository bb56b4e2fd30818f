"""Say in words why a bucket did not answer a request, and what to do about it."""

from __future__ import annotations

import re

# Searched for in messages, because obstore has one error for all of them.
_NO_BUCKET = re.compile(r"<Code>(NoSuchBucket|ContainerNotFound)</Code>")
_OTHER_REGION = re.compile(
    r"<Code>(PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocationConstraintException)</Code>"
    r"|incorrectly configured region"
)
_NO_ANSWER = re.compile(
    r"Error performing \w+ (https?://[^/\s?]+)\S* in .* - HTTP error: error sending request"
)
_STATUS = re.compile(r"status code: (\d+) ([\w ]*)")
_CODE, _MESSAGE = (re.compile(rf"<{name}>(.*?)</{name}>", re.DOTALL) for name in ("Code", "Message"))

# The services of a virtual machine that give credentials: asked last, where no others are found.
_MACHINES = {
    "s3": re.compile(r"//[^/\s]+/latest/(api/token|meta-data/)"),
    "gcs": re.compile(r"//[^/\s]+/computeMetadata/"),
    "azure": re.compile(r"//[^/\s]+/metadata/identity/"),
}
_LOOKED_IN = {
    "s3": "the environment (AWS_ACCESS_KEY_ID), ~/.aws",
    "gcs": "the environment (GOOGLE_APPLICATION_CREDENTIALS), the default credentials of gcloud",
    "azure": "the environment (AZURE_STORAGE_CONNECTION_STRING, AZURE_STORAGE_ACCOUNT_KEY)",
}
_TO_SET = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gcs": "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`",
    "azure": "set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_KEY",
}


def no_credentials(bucket: str, cloud: str, machine: str) -> PermissionError:
    """Return the error for a bucket without credentials. `machine` says whether the machine was asked."""
    return PermissionError(
        f"{bucket}: no credentials found: looked in {_LOOKED_IN[cloud]}{machine}; {_TO_SET[cloud]}, or give the "
        "store option anonymous=True if the data are public"
    )


def is_no_bucket(answer: str) -> bool:
    return bool(_NO_BUCKET.search(answer))


def known_error(answer: str, bucket: str, where: str, to: str) -> OSError | None:
    """Return an error with its remedy if the answer has a usual cause: no bucket, no credentials, no permission.

    answer   the message of obstore
    bucket   the URL of the bucket
    where    the URL of the object
    to       the purpose of the request, such as "read it"
    """
    if is_no_bucket(answer):
        name = bucket.rpartition("/")[2]
        return OSError(
            f"{bucket}: bucket {name} does not exist (or lies in another region); create it or check the name"
        )
    if _OTHER_REGION.search(answer):
        return OSError(
            f"{bucket}: the bucket lies in another region; set AWS_REGION or the store option region"
        )
    for cloud, pattern in _MACHINES.items():
        if pattern.search(answer):
            return no_credentials(bucket, cloud, ", the role of this machine")
    if unreachable := _NO_ANSWER.search(answer):
        return OSError(
            f"{where}: the server {unreachable[1]} cannot be reached; check the network and the address "
            "(AWS_ENDPOINT_URL or the store option endpoint, if the server is your own)"
        )
    status = _STATUS.search(answer)
    if status and status[1] in ("401", "403"):
        return PermissionError(
            f"{where}: permission denied: the server refuses to {to} ({in_words(answer)}); check the credentials and "
            "what they may do here"
        )
    return None


def in_words(answer: str) -> str:
    """Return the status, the code and the message of a server's answer; the whole text if it has none of them."""
    status, code, message = (pattern.search(answer) for pattern in (_STATUS, _CODE, _MESSAGE))
    said = ": ".join(found[1].strip() for found in (code, message) if found)
    return ", ".join(filter(None, (status and f"{status[1]} {status[2]}".strip(), said))) or answer
