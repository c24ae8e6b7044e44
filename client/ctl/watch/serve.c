/* See serve.h. */
#include "client/ctl/watch/serve.h"

#include <signal.h>
#include <string.h>
#include <unistd.h>

#include <microhttpd.h>

#include "client/ctl/base/say.h"
#include "proto/base/check.h"
#include "proto/page/page.h"

#define CONNECTIONS_MAX   64u
#define CONNECTION_IDLE_S 5u
#define REQUEST_BYTES_MAX ((size_t)16 * 1024)

struct serve_answer serve_text(unsigned code, const char *text)
{
    return (struct serve_answer){ .code = code, .body = text, .bytes = strlen(text) };
}

const char *serve_argument(const struct serve *s, const char *key)
{
    return s->asking != NULL ? MHD_lookup_connection_value(s->asking, MHD_GET_ARGUMENT_KIND, key)
                             : NULL;
}

static enum MHD_Result reply(struct MHD_Connection *c, const struct serve_answer *a)
{
    static const char *const headers[][2] = { { "Content-Security-Policy", PAGE_SECURITY_POLICY },
                                              { "X-Content-Type-Options", "nosniff" },
                                              { "Referrer-Policy", "no-referrer" },
                                              { "Cache-Control", "no-store" } };
    struct MHD_Response *r = MHD_create_response_from_buffer(a->bytes, (void *)(uintptr_t)a->body,
                                                             a->changes ? MHD_RESPMEM_MUST_COPY
                                                                        : MHD_RESPMEM_PERSISTENT);
    if (r == NULL)
        return MHD_NO; /* no memory: the connection is closed */
    enum MHD_Result added = MHD_add_response_header(
        r, "Content-Type", a->type != NULL ? a->type : "text/plain; charset=utf-8");
    for (size_t i = 0; i < ARRAY_SIZE(headers) && added == MHD_YES; i++)
        added = MHD_add_response_header(r, headers[i][0], headers[i][1]);
    if (a->code == MHD_HTTP_METHOD_NOT_ALLOWED && added == MHD_YES)
        added = MHD_add_response_header(r, "Allow", "GET, HEAD");
    const enum MHD_Result queued = added == MHD_YES ? MHD_queue_response(c, a->code, r) : MHD_NO;
    MHD_destroy_response(r);
    return queued;
}

static enum MHD_Result reply_text(struct MHD_Connection *c, unsigned code, const char *text)
{
    const struct serve_answer a = serve_text(code, text);
    return reply(c, &a);
}

/* MHD's handler; its one thread calls it first when the head is in, then for the body or its end.
 * What needs no body is answered at once. */
static enum MHD_Result handle(void *arg, struct MHD_Connection *c, const char *path,
                              const char *method, const char *version, const char *body,
                              size_t *body_bytes, void **request)
{
    static char seen;
    struct serve *s = arg;
    struct serve_answer a = { .code = 0 };
    (void)version;
    (void)body;
    const char *host = MHD_lookup_connection_value(c, MHD_HEADER_KIND, MHD_HTTP_HEADER_HOST);
    if (strcmp(method, MHD_HTTP_METHOD_GET) != 0 && strcmp(method, MHD_HTTP_METHOD_HEAD) != 0)
        return reply_text(c, MHD_HTTP_METHOD_NOT_ALLOWED, "this only shows\n");
    if (*request == NULL) { /* MHD wants to be answered in the second call: the connection stays */
        *request = &seen;
        return MHD_YES;
    }
    if (*body_bytes > 0) {
        *body_bytes = 0; /* a GET's body means nothing */
        return MHD_YES;
    }
    if (!s->allow_remote && (host == NULL || !listen_host_is_local(host)))
        return reply_text(c, MHD_HTTP_FORBIDDEN,
                          "the Host header does not name this machine: open it as localhost\n");
    s->asking = c;
    s->answer(s->ctx, path, &a);
    s->asking = NULL;
    return a.code != 0 ? reply(c, &a) : reply_text(c, MHD_HTTP_NOT_FOUND, s->paths);
}

int serve_listen(const struct serve *s, const char *where, const char *socket, int *ret_fd,
                 char name[LISTEN_NAME_BYTES], struct shd_err *e)
{
    bool remote;
    if (socket != NULL)
        return listen_unix(socket, ret_fd, e);
    int r = listen_tcp(where, s->allow_remote ? LISTEN_REMOTE : 0, ret_fd, &remote, e);
    if (r == SHD_EAUTH)
        return err_set(e, r,
                       "'%s' can be reached by other machines, and there is no password: whoever "
                       "gets there sees %s. From another machine rather: ssh -L. To do it all the "
                       "same: --allow-remote",
                       where, s->seen);
    if (r != SHD_OK)
        return r;
    r = listen_name(*ret_fd, name, e);
    if (r != SHD_OK)
        close(*ret_fd);
    return r;
}

int serve_until_signal(struct serve *s, int fd, void (*begun)(void *arg), void *arg)
{
    sigset_t ends;
    int signal_number;
    sigemptyset(&ends);
    sigaddset(&ends, SIGINT);
    sigaddset(&ends, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &ends, NULL);
    struct MHD_Daemon *httpd = MHD_start_daemon(
        MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_AUTO, 0, NULL, NULL, handle, s,
        MHD_OPTION_LISTEN_SOCKET, fd, MHD_OPTION_CONNECTION_LIMIT, CONNECTIONS_MAX,
        MHD_OPTION_CONNECTION_TIMEOUT, CONNECTION_IDLE_S, MHD_OPTION_CONNECTION_MEMORY_LIMIT,
        REQUEST_BYTES_MAX, MHD_OPTION_END);
    if (httpd == NULL) {
        ctl_say("cannot start the HTTP server");
        close(fd);
        return CTL_FAILED;
    }
    if (begun != NULL)
        begun(arg);
    sigwait(&ends, &signal_number);
    MHD_stop_daemon(httpd);
    return CTL_OK;
}
