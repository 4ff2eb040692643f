# One image for the router and, for trying it out, the fake replicas and the load. Build: docker build -t warmroute .
FROM python:3.11.14-slim AS build
WORKDIR /src
COPY requirements.lock ./
RUN python -m venv /opt/warmroute && /opt/warmroute/bin/pip install --no-cache-dir --require-hashes -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY router router
COPY fake_backend fake_backend
COPY bench bench
RUN /opt/warmroute/bin/pip install --no-cache-dir --no-deps .

FROM python:3.11.14-slim
RUN useradd --system --uid 10001 --no-create-home warmroute
COPY --from=build /opt/warmroute /opt/warmroute
ENV PATH=/opt/warmroute/bin:$PATH PYTHONUNBUFFERED=1
USER warmroute
# Inside a container loopback is nobody's: the clients' side listens on all addresses. The admin side, 8081, stays inside
# until WARMROUTE_ADMIN_HOST and a token (WARMROUTE_ADMIN_TOKEN_FILE) let it out.
EXPOSE 8080 8081
ENV WARMROUTE_HOST=0.0.0.0
# It lives; whether it can serve is for /ready to say. With another port or TLS, give a check of your own.
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen('http://127.0.0.1:%s/health' % os.environ.get('WARMROUTE_PORT', '8080'), timeout=2)"]
ENTRYPOINT ["warmroute"]
CMD ["serve"]
