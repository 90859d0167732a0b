# A server of sessions: docker build --tag jaxstate .
#
# EXTRA=cuda or EXTRA=tpu installs JAX for that accelerator; without it, for CPUs.
# State lies in /state, weights and compiled programs in /cache. Inside a container a server has to
# listen on 0.0.0.0, which it refuses without TLS and tokens, or --force: see README.md.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim

ARG EXTRA=""

# The kernels for CPUs are compiled on first use.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 10001 jaxstate \
    && mkdir /cache /state \
    && chown jaxstate /cache /state

COPY pyproject.toml README.md LICENSE /source/
COPY jaxstate /source/jaxstate
COPY models /source/models
COPY kernels_pallas /source/kernels_pallas
COPY serving /source/serving
RUN pip install --no-cache-dir "/source${EXTRA:+[$EXTRA]}" && rm -rf /source

USER jaxstate
WORKDIR /home/jaxstate
# XDG_CACHE_HOME is where compiled kernels go, JAXSTATE_CACHE weights and compiled programs.
ENV JAXSTATE_CACHE=/cache/jaxstate XDG_CACHE_HOME=/cache
VOLUME ["/cache", "/state"]
EXPOSE 50051 50052

# Whether grpc.health.v1 says SERVING, which it tells without a token. For TLS name who signed the
# certificate, and the host that it is for: --env HEALTH_TLS_CA=/tls/ca.pem.
ENV HEALTH_ADDRESS=localhost:50051 HEALTH_TLS_CA=""
HEALTHCHECK --interval=30s --timeout=10s --start-period=10m \
    CMD ["python", "-c", "from os import environ; from jaxstate.serving import Client, Tls; ca = environ['HEALTH_TLS_CA']; raise SystemExit(not Client(environ['HEALTH_ADDRESS'], tls=Tls(ca=ca) if ca else None, timeout_s=5, retry=False).is_serving())"]

ENTRYPOINT ["jaxstate", "serve"]
CMD ["--help"]
