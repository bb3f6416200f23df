# SPDX-License-Identifier: Apache-2.0
"""A router pod's last act before it is stopped: wait until it holds no request.

    wait_idle.py URL PROPAGATION LONGEST

URL: the router's /health. PROPAGATION: seconds in which proxies may still send requests, because they have not learned
yet that the pod is leaving. LONGEST: seconds after which a request would have ended anyway. Exits 0 in every case: a
hook that fails would not keep the pod.
"""

import json
import ssl
import sys
import time
import urllib.error
import urllib.request

POLL_SECONDS = 0.5


def in_flight(url: str) -> int:
    """Requests that the router holds, waiting ones included; 0 when it does not answer, because it is gone then."""
    # The certificate names the Service, not this address, and what answers here is this pod itself.
    context = ssl._create_unverified_context() if url.startswith("https:") else None
    try:
        with urllib.request.urlopen(url, timeout=5, context=context) as answer:
            body = answer.read()
    except urllib.error.HTTPError as error:  # 503 without a decode worker has the same body
        body = error.read()
    except OSError:
        return 0
    try:
        return int(json.loads(body).get("in_flight", 0))
    except ValueError:
        return 0


def main(url: str, propagation: float, longest: float) -> int:
    """Wait; prints how it ended, for the event of the pod."""
    time.sleep(propagation)
    deadline = time.monotonic() + longest
    while held := in_flight(url):
        if time.monotonic() >= deadline:
            print(f"{held} requests are still in flight after {longest:g} s")
            return 0
        time.sleep(POLL_SECONDS)
    print("idle")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3])))
