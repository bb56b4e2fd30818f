"""Say in words why a bucket did not answer a request, and what to do about it."""

from __future__ import annotations

import re

# Searched for in messages, because obstore has one error for all of them.
_NO_BUCKET = re.compile(r"<Code>(NoSuchBucket|ContainerNotFound)</Code>")
# AuthorizationHeaderMalformed is also the answer to an empty access key.
_OTHER_REGION = re.compile(
    r"<Code>(PermanentRedirect|IllegalLocationConstraintException)</Code>"
    r"|<Code>AuthorizationHeaderMalformed</Code>.*\bregion\b|incorrectly configured region",
    re.DOTALL,
)
_NO_ANSWER = re.compile(
    r"Error performing \w+ (https?://[^/\s?]+)\S* in .* - HTTP error: error sending request"
)
_STATUS = re.compile(r"status code: (\d+) ([\w ]*)")
_PARTS = [re.compile(rf"<{name}>(.*?)</{name}>", re.DOTALL) for name in ("Code", "Message", "Details")]
CALLS_THAT_READ = (
    "load, open, inspect, verify, diff, steps, latest, report and serve need no permission to write"
)
_READING = ("read it", "look it up", "list it")
_MOST_WORDS = 300  # of an answer in another form, such as the page of a proxy

# Refusals that other permissions do not end.
_REMEDIES = {
    "ExpiredToken": "the credentials have expired; renew them",
    "RequestTimeTooSkewed": "set the clock of this machine",
    "InvalidObjectState": "the object is in an archive; restore it from there first",
}

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


def has_no_credentials(answer: str, where: str) -> bool:
    """Tell whether the machine was asked for credentials in vain, which may end by a timeout."""
    return _asked_machine(answer, where) is not None


def _asked_machine(answer: str, where: str) -> str | None:
    """Return the cloud whose service of virtual machines was asked, and not the object at `where`, in whose key the
    path of such a service may occur."""
    found = (cloud for cloud, asked in _MACHINES.items() if asked.search(answer) and not asked.search(where))
    return next(found, None)


def known_error(answer: str, bucket: str, where: str, to: str, *, is_refused: bool = False) -> OSError | None:
    """Return an error with its remedy if the answer has a usual cause: no bucket, no credentials, no permission.

    answer      the message of obstore
    bucket      the URL of the bucket
    where       the URL of the object
    to          the purpose of the request, such as "read it"
    is_refused  whether obstore calls it a refusal
    """
    if is_no_bucket(answer):
        name = bucket.rpartition("/")[2]
        return OSError(
            f"{bucket}: bucket {name} does not exist (or lies in another region); create it or check the name"
        )
    if _OTHER_REGION.search(answer):
        said = f" ({words})" if (words := _said(answer)) else ""
        return OSError(
            f"{bucket}: the bucket lies in another region; set AWS_REGION or the store option region{said}"
        )
    if cloud := _asked_machine(answer, where):
        said = f"answered {in_words(answer)}" if _STATUS.search(answer) else "did not answer"
        return no_credentials(bucket, cloud, f", the role of this machine (its service {said})")
    if unreachable := _NO_ANSWER.search(answer):
        return OSError(
            f"{where}: the server {unreachable[1]} cannot be reached; check the network and the address "
            "(AWS_ENDPOINT_URL or the store option endpoint, if the server is your own)"
        )
    status, code = _STATUS.search(answer), _PARTS[0].search(answer)
    if code and (remedy := _REMEDIES.get(code[1].strip())):
        return PermissionError(f"{where}: the server refuses to {to} ({in_words(answer)}); {remedy}")
    if is_refused or (status and status[1] in ("401", "403")):
        return PermissionError(
            f"{where}: permission denied: the server refuses to {to} ({in_words(answer)}); check the credentials and "
            f"what they may do here{'' if to in _READING else f'; {CALLS_THAT_READ}'}"
        )
    return None


def in_words(answer: str) -> str:
    """Return the status of a server's answer with its code and message, or with its beginning if it has no code; the
    whole text without a status."""
    status = _STATUS.search(answer)
    said = _said(answer) or (_beginning(answer[status.end() :]) if status else "")
    return ", ".join(filter(None, (status and f"{status[1]} {status[2]}".strip(), said))) or answer


def _said(answer: str) -> str:
    found = (part.search(answer) for part in _PARTS)
    return ": ".join(one[1].strip() for one in found if one)


def _beginning(body: str) -> str:
    return " ".join(re.sub(r"<(style|script)\b.*?</\1>|<[^>]*>", " ", body, flags=re.DOTALL).split()).lstrip(
        ": "
    )[:_MOST_WORDS]
