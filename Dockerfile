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
EXPOSE 8080 8081
# Inside a container loopback is nobody's: the clients' side listens on all addresses, the admin side stays inside.
ENV WARMROUTE_HOST=0.0.0.0
ENTRYPOINT ["warmroute"]
CMD ["serve"]
