/* See report.h. */
#include "daemon/relay/report.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <jansson.h>
#include <microhttpd.h>

#include "daemon/relay/bulk.h"
#include "daemon/relay/relay.h"
#include "daemon/relay/routes.h"
#include "daemon/relay/traffic.h"
#include "proto/base/clock.h"
#include "proto/base/version.h"
#include "proto/share/listen.h"

#define SCHEMA      1
#define CONNECTIONS 16u
#define TIMEOUT_S   5u

/* -- The document ------------------------------------------------------------------------------ */

static void set_live(json_t *of, const struct traffic_view *v)
{
    static const char *const names[TRAFFIC_LIVE] = { "sessions", "sessions_served", "mirrors",
                                                     "mirrors_fed" };
    for (uint32_t i = 0; i < TRAFFIC_LIVE; i++)
        json_object_set_new(of, names[i], json_integer(v->live[i]));
}

static json_t *model_json(const struct traffic_view *v)
{
    static const char *const names[TRAFFIC_BYTES] = { "parameters_in", "parameters_out",
                                                      "gradients_in", "gradients_out" };
    json_t *model = json_pack("{s:s}", "name", v->model);
    set_live(model, v);
    for (uint32_t i = 0; i < TRAFFIC_BYTES; i++)
        json_object_set_new(model, names[i], json_integer((json_int_t)v->bytes[i]));
    return model;
}

static json_t *peer_json(const struct relay *relay, const struct traffic_view *peer)
{
    json_t *json = json_pack("{s:s}", "host", peer->host);
    json_t *models = json_array();
    struct traffic_view v;
    set_live(json, peer);
    json_object_set_new(json, "bytes_in", json_integer((json_int_t)peer->in));
    json_object_set_new(json, "bytes_out", json_integer((json_int_t)peer->out));
    for (struct traffic *t = NULL; (t = traffic_next(relay, t, &v)) != NULL;)
        if (v.model[0] != '\0' && strcmp(v.host, peer->host) == 0)
            json_array_append_new(models, model_json(&v));
    json_object_set_new(json, "models", models);
    return json;
}

static json_t *own_json(const struct routes *routes)
{
    json_t *devices = json_array();
    char device[CLUSTER_DEVICE_BYTES];
    for (const char *at = routes->own; cluster_next_device(&at, device);)
        json_array_append_new(devices, json_string(device));
    return devices;
}

static json_t *in_stead_json(const struct routes *routes)
{
    json_t *all = json_array();
    for (uint32_t i = 0; i < routes->count; i++)
        json_array_append_new(all, json_pack("{s:s, s:s}", "device", routes->items[i].device,
                                             "host", routes->items[i].host));
    return all;
}

static char *status_text(struct relay *relay)
{
    json_t *peers = json_array();
    struct traffic_view v;
    pthread_mutex_lock(&relay->lock);
    for (struct traffic *t = NULL; (t = traffic_next(relay, t, &v)) != NULL;)
        if (v.model[0] == '\0')
            json_array_append_new(peers, peer_json(relay, &v));
    pthread_mutex_unlock(&relay->lock);
    json_t *root = json_pack("{s:i, s:s, s:s, s:i, s:I, s:s?, s:s, s:o, s:o, s:o}", "schema",
                             SCHEMA, "relay", relay->config->host, "version", SHARDD_VERSION, "pid",
                             (int)getpid(), "uptime_s",
                             (json_int_t)((clock_now_ns() - relay->since_ns) / NS_PER_S), "listens",
                             relay->routes->serves ? bulk_keys_address(relay->keys) : NULL, "bulk",
                             bulk_keys_way(relay->keys), "devices", own_json(relay->routes),
                             "in_stead", in_stead_json(relay->routes), "peers", peers);
    char *text = root != NULL ? json_dumps(root, JSON_COMPACT) : NULL;
    json_decref(root);
    return text;
}

/* -- HTTP -------------------------------------------------------------------------------------- */

static enum MHD_Result reply(struct MHD_Connection *connection, unsigned code, const char *type,
                             char *text, enum MHD_ResponseMemoryMode mode)
{
    struct MHD_Response *response = MHD_create_response_from_buffer(strlen(text), text, mode);
    if (response == NULL)
        return MHD_NO;
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, type);
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONNECTION, "close");
    const enum MHD_Result result = MHD_queue_response(connection, code, response);
    MHD_destroy_response(response);
    return result;
}

static enum MHD_Result requested(void *cls, struct MHD_Connection *connection, const char *url,
                                 const char *method, const char *version, const char *upload,
                                 size_t *upload_bytes, void **request)
{
    static char no_such[] = "there is /status\n", no_way[] = "GET and HEAD\n";
    (void)version;
    (void)upload;
    if (*request == NULL) { /* the headers are in; the next call may answer */
        *request = cls;
        return MHD_YES;
    }
    if (*upload_bytes > 0)
        return MHD_NO; /* nothing here takes a body */
    if (strcmp(method, "GET") != 0 && strcmp(method, "HEAD") != 0)
        return reply(connection, MHD_HTTP_METHOD_NOT_ALLOWED, "text/plain", no_way,
                     MHD_RESPMEM_PERSISTENT);
    if (strcmp(url, "/status") != 0)
        return reply(connection, MHD_HTTP_NOT_FOUND, "text/plain", no_such, MHD_RESPMEM_PERSISTENT);
    char *text = status_text(cls);
    return text != NULL
               ? reply(connection, MHD_HTTP_OK, "application/json", text, MHD_RESPMEM_MUST_FREE)
               : MHD_NO;
}

static int path_of(const struct relay *relay, char *path, size_t bytes)
{
    return snprintf(path, bytes, "%s/" REPORT_FILE, relay->config->runtime_dir);
}

int report_begin(struct relay *relay, struct shd_err *e)
{
    char path[sizeof(((struct sockaddr_un *)NULL)->sun_path)];
    int fd;
    if (path_of(relay, path, sizeof path) >= (int)sizeof path)
        return err_set(e, SHD_ERANGE, "'%.60s...' is too long for a socket's path", path);
    const int r = listen_unix(path, &fd, e);
    if (r != SHD_OK)
        return r == SHD_EBUSY ? err_prefix(e, "there is another relay in this directory, and one "
                                              "does it all")
                              : r;
    chmod(path, 0660); /* as a daemon's: the directory says who gets there */
    if (MHD_start_daemon(MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_POLL, 0, NULL, NULL, requested,
                         relay, MHD_OPTION_LISTEN_SOCKET, fd, MHD_OPTION_CONNECTION_LIMIT,
                         CONNECTIONS, MHD_OPTION_CONNECTION_TIMEOUT, TIMEOUT_S,
                         MHD_OPTION_END) != NULL)
        return SHD_OK;
    close(fd);
    unlink(path);
    return err_set(e, SHD_EIO, "no thread for '%s'", path);
}

void report_end(const struct relay *relay)
{
    char path[sizeof(((struct sockaddr_un *)NULL)->sun_path)];
    if (path_of(relay, path, sizeof path) < (int)sizeof path)
        unlink(path);
}
