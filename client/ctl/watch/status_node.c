/* See status_node.h. */
#include "client/ctl/watch/status_node.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "client/ctl/base/down_note.h"
#include "client/ctl/base/say.h"
#include "client/ctl/base/text.h"
#include "client/session/address.h"
#include "client/session/where.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/dir.h"
#include "proto/base/process.h"
#include "proto/share/listen.h"

#define STATUS_BYTES_MAX ((size_t)32 * 1024 * 1024) /* 64 models of 4,096 units */
#define TIMEOUT_MS       1500
#define RELAY_STATUS     "relay.status"
#define TIMEOUT_MS_MAX   3600000

/* -- Which ----------------------------------------------------------------------------------- */

/* "cpu0" of "cpu0.status" and "cpu0.sock". Names that no daemon has are nobody's, nor is a relay's.
 */
static bool device_of(const char *file, char device[DOC_NAME_BYTES])
{
    static const char allowed[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-";
    const size_t bytes = strspn(file, allowed);
    if (bytes == 0 || bytes >= DOC_NAME_BYTES || strcmp(file, RELAY_STATUS) == 0 ||
        (strcmp(file + bytes, ".status") != 0 && strcmp(file + bytes, ".sock") != 0))
        return false;
    memcpy(device, file, bytes);
    device[bytes] = '\0';
    return true;
}

static struct node_daemon *find(const struct node *n, const char *device)
{
    for (uint32_t i = 0; i < n->count; i++)
        if (strcmp(n->daemons[i].device, device) == 0)
            return &n->daemons[i];
    return NULL;
}

static int add(struct node *n, const char *device, struct shd_err *e)
{
    if (n->count == NODE_DAEMONS_MAX)
        return err_set(e, SHD_ERANGE, "more than %u daemons in '%.100s'", NODE_DAEMONS_MAX, n->dir);
    struct node_daemon *grown = realloc(n->daemons, (n->count + 1) * sizeof(*grown));
    if (grown == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " daemons", n->count + 1);
    n->daemons = grown;
    uint32_t at = n->count++;
    for (; !n->listed && at > 0 && address_compare(n->daemons[at - 1].device, device) > 0; at--)
        n->daemons[at] = n->daemons[at - 1];
    n->daemons[at] = (struct node_daemon){ .state = "" };
    snprintf(n->daemons[at].device, sizeof(n->daemons[at].device), "%s", device);
    return SHD_OK;
}

static int open_failed(const char *dir, struct shd_err *e)
{
    if (errno == ENOENT || errno == ENOTDIR)
        return err_set(
            e, SHD_ENOENT,
            "no directory '%.100s': start daemons (`shardctl up`), or say where they are "
            "(--address)",
            dir);
    return err_sys(e, errno == EACCES ? SHD_EAUTH : SHD_EIO, "open '%.100s'", dir);
}

int node_scan(struct node *n, struct shd_err *e)
{
    char device[DOC_NAME_BYTES];
    int r = SHD_OK;
    if (n->listed)
        return SHD_OK;
    DIR *dir = opendir(n->dir);
    if (dir == NULL)
        return open_failed(n->dir, e);
    for (const char *name = dir_next(&dir); name != NULL; name = dir_next(&dir))
        if (r == SHD_OK && device_of(name, device) && find(n, device) == NULL)
            r = add(n, device, e);
    return r;
}

static bool has_socket(const struct node *n, const char *device)
{
    static const char *const endings[] = { "status", "sock" };
    char path[NODE_SOCKET_BYTES];
    for (size_t i = 0; i < ARRAY_SIZE(endings); i++) {
        snprintf(path, sizeof(path), "%s/%s.%s", n->dir, device, endings[i]);
        if (access(path, F_OK) == 0 || errno != ENOENT)
            return true;
    }
    return false;
}

void node_forget_gone(struct node *n)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < n->count; i++) {
        struct node_daemon *d = &n->daemons[i];
        CHECK(d->http == NULL);
        if (n->listed || has_socket(n, d->device)) {
            n->daemons[kept++] = *d;
            continue;
        }
        doc_free(d->doc);
        json_decref(d->json);
    }
    n->count = kept;
}

static int open_listed(const char *address, struct node *n, struct shd_err *e)
{
    struct address a;
    int r = address_parse(address, &a, e);
    if (r != SHD_OK)
        return r;
    n->listed = true;
    snprintf(n->dir, sizeof(n->dir), "%s", a.dir);
    for (uint32_t i = 0; i < a.count && r == SHD_OK; i++)
        r = strlen(a.devices[i]) < DOC_NAME_BYTES
                ? add(n, a.devices[i], e)
                : err_set(e, SHD_ERANGE, "device name '%.60s' is too long", a.devices[i]);
    address_free(&a);
    return r;
}

static int open_dir(const char *dir, struct node *n, struct shd_err *e)
{
    if (snprintf(n->dir, sizeof(n->dir), "%s", dir) >= (int)sizeof(n->dir))
        return err_set(e, SHD_ERANGE, "the directory's path has %zu bytes, at most %zu",
                       strlen(dir), sizeof(n->dir) - 1);
    const int r = node_scan(n, e);
    if (r == SHD_OK && n->count == 0)
        return err_set(e, SHD_ENOENT, "no daemon in '%.100s'", dir);
    return r;
}

/* The list is empty again. */
static void forget(struct node *n)
{
    for (uint32_t i = 0; i < n->count; i++) {
        http_free(n->daemons[i].http);
        doc_free(n->daemons[i].doc);
        json_decref(n->daemons[i].json);
    }
    free(n->daemons);
    n->daemons = NULL;
    n->count = 0;
}

/* Of one answer. A slow or busy machine's daemons may need longer. */
static uint64_t answer_timeout_ms(void)
{
    const char *env = getenv("SHARDD_STATUS_TIMEOUT_MS");
    const uint64_t ms = env != NULL ? strtoull(env, NULL, 10) : 0;
    return ms > 0 && ms <= TIMEOUT_MS_MAX ? ms : TIMEOUT_MS;
}

int node_fail(int status, const struct shd_err *e)
{
    char text[sizeof(e->text)];
    ctl_say("%s", text_clean(e->text, text, sizeof(text)));
    return status == SHD_EINVAL ? CTL_USAGE : CTL_FAILED;
}

static int open_local(const char *address, struct node *n, struct shd_err *e)
{
    struct where where;
    int r = where_find(address, &where, e);
    if (r != SHD_OK)
        return r;
    if (strncmp(where.address, "local:", 6) == 0)
        return err_set(e, SHD_EINVAL, "'%.60s': owners inside a process have no status sockets",
                       where.address);
    if (strchr(where.address, '?') != NULL)
        return open_listed(where.address, n, e);
    r = open_dir(where.address, n, e);
    if (r == SHD_ENOENT)
        snprintf(e->text + strlen(e->text), sizeof(e->text) - strlen(e->text), "%s",
                 where_said(where.by));
    return r;
}

static int open_hosts(const char *hosts, struct node *n, struct shd_err *e)
{
    int r = SHD_OK;
    n->tcp = n->listed = true;
    for (const char *at = hosts; r == SHD_OK; at++) {
        char name[DOC_NAME_BYTES], host[LISTEN_HOST_BYTES];
        const size_t bytes = strcspn(at, ",");
        const char *port;
        snprintf(name, sizeof(name), "%.*s", (int)bytes, at);
        if (bytes >= sizeof(name) || !listen_split(name, host, &port))
            return err_set(e, SHD_EINVAL,
                           "'%.*s' is not HOST:PORT of at most %zu characters, as 'node1:9464'",
                           bytes < 60 ? (int)bytes : 60, at, sizeof(name) - 1);
        r = add(n, name, e);
        at += bytes;
        if (*at == '\0')
            break;
    }
    return r;
}

static int open_any(const char *address, const char *hosts, struct node *ret_node,
                    struct shd_err *e)
{
    struct node n = { .timeout_ms = answer_timeout_ms() };
    int r = http_client_init(&n.client, e);
    if (r != SHD_OK)
        return r;
    r = hosts != NULL ? open_hosts(hosts, &n, e) : open_local(address, &n, e);
    if (r == SHD_OK)
        *ret_node = n;
    else
        node_close(&n);
    return r;
}

int node_open(const char *address, const char *hosts, struct node *ret_node)
{
    struct shd_err e = { 0 };
    const int r = open_any(address, hosts, ret_node, &e);
    return r == SHD_OK ? CTL_OK : node_fail(r, &e);
}

int node_open_at(const char *address, struct node *ret_node, struct shd_err *e)
{
    CHECK(address != NULL);
    return open_any(address, /* hosts= */ NULL, ret_node, e);
}

void node_close(struct node *n)
{
    forget(n);
    http_client_deinit(&n->client);
}

static int open_early(const char *address, struct node *n, struct shd_err *e)
{
    struct where where;
    int r = where_find(address, &where, e);
    if (r != SHD_OK)
        return r;
    if (strncmp(where.address, "local:", 6) == 0 || strchr(where.address, '?') != NULL)
        return open_local(where.address, n, e);
    r = open_dir(where.address, n, e);
    return r == SHD_ENOENT ? SHD_OK : r;
}

int node_open_early(const char *address, struct node *ret_node)
{
    struct node n = { .timeout_ms = answer_timeout_ms() };
    struct shd_err e = { 0 };
    int r = http_client_init(&n.client, &e);
    if (r != SHD_OK)
        return node_fail(r, &e);
    r = open_early(address, &n, &e);
    if (r == SHD_OK) {
        *ret_node = n;
        return CTL_OK;
    }
    node_close(&n);
    return node_fail(r, &e);
}

int node_interval(const char *text, uint64_t *ret_ms, struct shd_err *e)
{
    char *end;
    const double s = strtod(text, &end);
    if (text[0] < '0' || text[0] > '9' || *end != '\0')
        return err_set(e, SHD_EINVAL,
                       "an interval is a number of seconds, as 2 or 0.5, not '%.40s'", text);
    if (!(s >= 0.1 && s <= 3600))
        return err_set(e, SHD_ERANGE, "an interval of %.40s s: its limits are 0.1 and 3600", text);
    *ret_ms = (uint64_t)(s * 1000);
    return SHD_OK;
}

/* -- Asking ---------------------------------------------------------------------------------- */

void node_socket(const struct node *n, const struct node_daemon *d,
                 char ret_socket[NODE_SOCKET_BYTES])
{
    if (n->tcp)
        snprintf(ret_socket, NODE_SOCKET_BYTES, "%s", d->device);
    else
        snprintf(ret_socket, NODE_SOCKET_BYTES, "%s/%s.status", n->dir, d->device);
}

void node_ask(struct node *n, uint64_t interval_ms)
{
    const uint64_t now_ns = clock_now_ns();
    for (uint32_t i = 0; i < n->count; i++) {
        struct node_daemon *d = &n->daemons[i];
        char path[NODE_SOCKET_BYTES];
        if (d->http != NULL || now_ns < d->next_ns)
            continue;
        d->next_ns = now_ns + interval_ms * NS_PER_MS;
        node_socket(n, d, path);
        d->http = http_start(&n->client, path, "/status", STATUS_BYTES_MAX, n->timeout_ms);
    }
}

/* Who has d's socket, and what became of that process: one that is stopped has it still. */
static void look_at_process(const struct node *n, struct node_daemon *d)
{
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    struct ucred peer = { .pid = 0 };
    socklen_t bytes = sizeof(peer);
    char path[NODE_SOCKET_BYTES];
    node_socket(n, d, path);
    d->pid = 0;
    d->state = "";
    if (n->tcp || strlen(path) >= sizeof(a.sun_path))
        return;
    memcpy(a.sun_path, path, strlen(path) + 1);
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, (const struct sockaddr *)&a, sizeof(a)) == 0 &&
        getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && peer.pid > 0) {
        d->pid = peer.pid;
        d->state = process_state_now(peer.pid);
    }
    if (fd >= 0)
        close(fd);
}

static void set_down(const struct node *n, struct node_daemon *d, const struct shd_err *why)
{
    const uint64_t now_ns = clock_now_ns();
    d->up = false;
    d->asked = true;
    d->why = *why;
    text_clean(why->text, d->why.text, sizeof(d->why.text));
    look_at_process(n, d);
    if (d->down_ns == 0)
        d->down_ns = d->up_ns != 0 ? d->up_ns : now_ns;
}

void node_take(struct node *n, struct node_daemon *d, const char *text, size_t bytes)
{
    struct doc *doc;
    json_t *json = NULL;
    struct shd_err e = { 0 };
    if (doc_parse(text, bytes, n->with_tools, &doc, n->keep_json ? &json : NULL, &e) != SHD_OK) {
        set_down(n, d, &e);
        return;
    }
    doc_free(d->doc);
    json_decref(d->json);
    d->doc = doc;
    d->json = json;
    d->up = d->asked = true;
    d->up_ns = clock_now_ns();
    d->down_ns = 0;
}

/* One that does not answer: its keeper may know why, and when it tries again. */
static void not_there(const struct node *n, struct node_daemon *d)
{
    struct down_note note;
    struct shd_err e = d->http->err;
    char text[DOWN_NOTE_BYTES];
    if (!n->tcp && down_note_read(n->dir, d->device, &note))
        err_set(&e, SHD_EGONE, "%s", down_note_text(&note, clock_now_ns(), text));
    set_down(n, d, &e);
}

bool node_step(struct node *n)
{
    bool news = false;
    http_client_perform(&n->client);
    for (uint32_t i = 0; i < n->count; i++) {
        struct node_daemon *d = &n->daemons[i];
        if (d->http == NULL || d->http->state == HTTP_RUNNING)
            continue;
        if (d->http->state == HTTP_DONE)
            node_take(n, d, d->http->body, d->http->body_bytes);
        else
            not_there(n, d);
        http_free(d->http);
        d->http = NULL;
        news = true;
    }
    return news;
}

void node_ask_once(struct node *n)
{
    node_ask(n, /* interval_ms= */ 0);
    http_client_run(&n->client);
    node_step(n);
}

/* -- Judging --------------------------------------------------------------------------------- */

bool node_healthy(const struct node_daemon *d, char *why, size_t bytes)
{
    why[0] = '\0';
    if (!d->up)
        snprintf(why, bytes, "%s", d->asked ? d->why.text : "not asked yet");
    else if (d->doc->stale_ms > NODE_STALE_MS)
        snprintf(why, bytes, "its event loop has not turned for %.1f s",
                 d->doc->stale_ms < 1e9 ? d->doc->stale_ms / 1000 : 1e6);
    else if (d->doc->refused[0] != '\0')
        snprintf(why, bytes, "%s", d->doc->refused);
    return why[0] == '\0';
}

uint32_t node_up(const struct node *n)
{
    uint32_t up = 0;
    for (uint32_t i = 0; i < n->count; i++)
        up += n->daemons[i].up;
    return up;
}
