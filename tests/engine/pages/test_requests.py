"""Which requests are answered: those with the token, for this address, of its own pages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eformer._engine.pages.requests import RefusedError, Site, admitted

TOKEN = "s3cret-token_0123456789"
HERE = Site("127.0.0.1", 8090, TOKEN)
HOST = ("Host", "127.0.0.1:8090")


def status_of(target=f"/{TOKEN}/", *headers, site=HERE):
    with pytest.raises(RefusedError) as caught:
        admitted(site, target, headers)
    return caught.value.status


def test_a_request_with_the_token_is_split_into_parts_and_parameters():
    request = admitted(HERE, f"/{TOKEN}/step/100/leaf.json?path=a%2Fb.c&x=", [HOST, ("If-None-Match", '"7"')])
    assert request.parts == ("step", "100", "leaf.json")
    assert request.parameters == {"path": "a/b.c", "x": ""}
    assert request.known == '"7"'


@pytest.mark.parametrize(
    "target",
    ["/", "//", f"/{TOKEN[:-1]}/", f"/{TOKEN}x/", f"/x/{TOKEN}/", f"/?token={TOKEN}", f"/{TOKEN.upper()}/"],
)
def test_a_token_that_is_missing_or_wrong_is_refused(target):
    assert status_of(target, HOST) in (400, 403)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:8090", "127.0.0.1", "127.0.0.1:8091", "127.0.0.1:", "127.0.0.2:8090", "0.0.0.0:8090", "",
        "127.0.0.1:8090@evil.example", "evil.example", "127.0.0.1:8090.evil.example", "localhost.evil.example:8090",
    ],
)  # fmt: skip
def test_a_host_that_is_not_the_address_is_refused(host):
    assert status_of(f"/{TOKEN}/", ("Host", host)) == 421


def test_a_request_without_a_host_or_with_two_is_refused():
    assert status_of() == 421
    assert status_of(f"/{TOKEN}/", HOST, ("host", "evil.example:8090")) == 421


@pytest.mark.parametrize("host", ["127.0.0.1:8090", "localhost:8090", "[::1]:8090"])
def test_the_names_of_loopback_are_the_same_address(host):
    assert admitted(HERE, f"/{TOKEN}/", [("Host", host)]).parts == ("",)


def test_a_browser_leaves_out_port_80_and_writes_names_in_small_letters():
    assert admitted(Site("127.0.0.1", 80, TOKEN), f"/{TOKEN}/", [("Host", "127.0.0.1")])
    assert admitted(Site("::1", 80, TOKEN), f"/{TOKEN}/", [("Host", "[::1]")])
    assert admitted(Site("Node7", 8090, TOKEN), f"/{TOKEN}/", [("Host", "node7:8090")])
    assert status_of(f"/{TOKEN}/", ("Host", "evil.example"), site=Site("127.0.0.1", 80, TOKEN)) == 421


def test_beyond_loopback_addresses_and_the_given_name_are_accepted_and_no_other_name():
    wide, named = Site("0.0.0.0", 80, TOKEN), Site("node7", 80, TOKEN)
    assert admitted(wide, f"/{TOKEN}/", [("Host", "192.168.1.5:80")])
    assert admitted(named, f"/{TOKEN}/", [("Host", "node7:80")])
    assert status_of(f"/{TOKEN}/", ("Host", "node8:80"), site=named) == 421
    assert status_of(f"/{TOKEN}/", ("Host", "evil.example:80"), site=wide) == 421


@pytest.mark.parametrize(
    "headers",
    [
        [("Origin", "http://evil.example")],
        [("Origin", "null")],
        [("Origin", "https://127.0.0.1:8090")],
        [("Sec-Fetch-Site", "cross-site")],
        [("Sec-Fetch-Site", "same-site")],
        [("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "navigate"), ("Sec-Fetch-Dest", "iframe")],
        [("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "no-cors"), ("Sec-Fetch-Dest", "document")],
    ],
)
def test_requests_of_other_sites_are_refused_even_with_the_token(headers):
    assert status_of(f"/{TOKEN}/run.json", HOST, *headers) == 403


@pytest.mark.parametrize(
    "headers",
    [
        [("Sec-Fetch-Site", "same-origin")],
        [("Sec-Fetch-Site", "none")],
        [("Origin", "http://127.0.0.1:8090")],
        [("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "navigate"), ("Sec-Fetch-Dest", "document")],
    ],
)
def test_its_own_pages_and_links_that_somebody_follows_are_answered(headers):
    assert admitted(HERE, f"/{TOKEN}/", [HOST, *headers]).parts == ("",)


@pytest.mark.parametrize(
    "header", [("Content-Length", "5"), ("Transfer-Encoding", "chunked"), ("Content-Length", "-1")]
)
def test_a_request_with_a_body_is_refused(header):
    assert status_of(f"/{TOKEN}/", HOST, header) == 413


@pytest.mark.parametrize(
    "target",
    [
        f"http://127.0.0.1:8090/{TOKEN}/", TOKEN, f"//evil.example/{TOKEN}/", "*", f"/{TOKEN}/%ff", f"/{TOKEN}/?a=%ff",
        f"/{TOKEN}/?" + "&".join(f"a{n}=1" for n in range(99)),
    ],
)  # fmt: skip
def test_a_target_that_is_no_plain_path_is_refused(target):
    assert status_of(target, HOST) in (400, 403)


def test_the_token_is_not_in_the_text_of_a_site():
    assert TOKEN not in repr(HERE)


@given(st.text(max_size=80), st.lists(st.tuples(st.text(max_size=20), st.text(max_size=40)), max_size=4))
def test_no_target_and_no_headers_do_anything_but_be_refused(target, headers):
    with pytest.raises(RefusedError):
        admitted(HERE, target, [HOST, *headers])


@given(st.text(max_size=80))
def test_whatever_follows_the_token_is_data(rest):
    try:
        request = admitted(HERE, f"/{TOKEN}/{rest}", [HOST])
    except RefusedError:
        return
    assert all(isinstance(part, str) for part in (*request.parts, *request.parameters))
