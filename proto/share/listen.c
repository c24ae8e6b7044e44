/* See listen.h. */
#include "proto/share/listen.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "proto/base/check.h"

#define BACKLOG 1024 /* all workers of a host may come at once */

bool listen_split(const char *text, char host[LISTEN_HOST_BYTES], const char **ret_port)
{
    const char *colon = strrchr(text, ':');
    if (colon == NULL || colon == text || colon[1] == '\0' ||
        colon - text >= (int)LISTEN_HOST_BYTES)
        return false;
    size_t bytes = (size_t)(colon - text);
    if (text[0] == '[') {
        if (bytes < 3 || text[bytes - 1] != ']')
            return false;
        text++;
        bytes -= 2;
    }
    memcpy(host, text, bytes);
    host[bytes] = '\0';
    *ret_port = colon + 1;
    return true;
}

static bool address_is_loopback(const struct sockaddr *a)
{
    if (a->sa_family == AF_INET)
        return (ntohl(((const struct sockaddr_in *)(const void *)a)->sin_addr.s_addr) >> 24) == 127;
    return a->sa_family == AF_INET6 &&
           IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)(const void *)a)->sin6_addr);
}

int listen_name(int fd, char name[LISTEN_NAME_BYTES], struct shd_err *e)
{
    struct sockaddr_storage a = { 0 };
    socklen_t bytes = sizeof(a);
    char host[NI_MAXHOST], port[NI_MAXSERV];
    if (getsockname(fd, (struct sockaddr *)&a, &bytes) < 0)
        return err_sys(e, SHD_EIO, "name of the listening socket");
    const int r = getnameinfo((struct sockaddr *)&a, bytes, host, sizeof(host), port, sizeof(port),
                              NI_NUMERICHOST | NI_NUMERICSERV);
    if (r != 0)
        return err_set(e, SHD_EIO, "name of the listening socket: %s", gai_strerror(r));
    snprintf(name, LISTEN_NAME_BYTES, a.ss_family == AF_INET6 ? "[%.100s]:%.20s" : "%.100s:%.20s",
             host, port);
    return SHD_OK;
}

static int tcp_open(const struct addrinfo *a, const char *where, int *ret_fd, struct shd_err *e)
{
    const int on = 1;
    const int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return err_sys(e, SHD_EIO, "socket for '%s'", where);
    if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) < 0 ||
        bind(fd, a->ai_addr, a->ai_addrlen) < 0 || listen(fd, BACKLOG) < 0) {
        const int r = err_sys(e, errno == EADDRINUSE ? SHD_EBUSY : SHD_EIO, "listen at '%s'",
                              where);
        close(fd);
        return r;
    }
    *ret_fd = fd;
    return SHD_OK;
}

int listen_tcp(const char *where, unsigned flags, int *ret_fd, bool *ret_remote, struct shd_err *e)
{
    char host[LISTEN_HOST_BYTES];
    const char *port;
    if (!listen_split(where, host, &port))
        return err_set(e, SHD_EINVAL, "'%s' is not HOST:PORT, as '127.0.0.1:9464' or '[::1]:9464'",
                       where);
    const int numeric = flags & LISTEN_NAMES ? 0 : AI_NUMERICHOST;
    const struct addrinfo hints = { .ai_family = AF_UNSPEC,
                                    .ai_socktype = SOCK_STREAM,
                                    .ai_flags = numeric | AI_NUMERICSERV | AI_PASSIVE };
    struct addrinfo *found;
    const bool local = strcmp(host, "localhost") == 0;
    const int bad = getaddrinfo(local ? "127.0.0.1" : host, port, &hints, &found);
    if (bad != 0)
        return err_set(e, SHD_EINVAL, "'%s' is no %saddress and port: %s", where,
                       numeric != 0 ? "numeric " : "", gai_strerror(bad));
    const bool remote = !address_is_loopback(found->ai_addr);
    int r = SHD_OK;
    if (remote && (flags & LISTEN_REMOTE) == 0)
        r = err_set(e, SHD_EAUTH, "'%s' can be reached by other machines", where);
    if (r == SHD_OK)
        r = tcp_open(found, where, ret_fd, e);
    freeaddrinfo(found);
    if (r == SHD_OK)
        *ret_remote = remote;
    return r;
}

/* Whether somebody answers at a; a socket file without anybody is removed. */
static bool unix_is_live(const struct sockaddr_un *a)
{
    struct stat st;
    if (lstat(a->sun_path, &st) < 0 || !S_ISSOCK(st.st_mode))
        return false; /* what is no socket is bind()'s to refuse */
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    const bool live = fd >= 0 && (connect(fd, (const struct sockaddr *)a, sizeof(*a)) == 0 ||
                                  errno != ECONNREFUSED);
    if (fd >= 0)
        close(fd);
    if (!live)
        unlink(a->sun_path);
    return live;
}

int listen_unix(const char *path, int *ret_fd, struct shd_err *e)
{
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    if (strlen(path) >= sizeof(a.sun_path))
        return err_set(e, SHD_ERANGE, "'%.60s...' has %zu bytes, a socket's path at most %zu", path,
                       strlen(path), sizeof(a.sun_path) - 1);
    memcpy(a.sun_path, path, strlen(path) + 1);
    if (unix_is_live(&a))
        return err_set(e, SHD_EBUSY, "somebody listens at '%s' already", path);
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return err_sys(e, SHD_EIO, "socket for '%s'", path);
    const mode_t mask = umask(0177);
    const int bound = bind(fd, (const struct sockaddr *)&a, sizeof(a));
    umask(mask);
    if (bound < 0 || listen(fd, BACKLOG) < 0) {
        const int r = err_sys(e, SHD_EIO, "listen at '%s'", path);
        close(fd);
        return r;
    }
    *ret_fd = fd;
    return SHD_OK;
}

bool listen_is_bound(const char *path)
{
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    if (strlen(path) >= sizeof(a.sun_path))
        return false;
    memcpy(a.sun_path, path, strlen(path) + 1);
    const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return true;
    const bool none = connect(fd, (const struct sockaddr *)&a, sizeof(a)) < 0 &&
                      (errno == ENOENT || errno == ENOTDIR || errno == ECONNREFUSED);
    close(fd);
    return !none;
}

bool listen_host_is_local(const char *header)
{
    char host[LISTEN_HOST_BYTES];
    struct in_addr v4;
    struct in6_addr v6;
    const char *port;
    if (!listen_split(header, host, &port) &&
        snprintf(host, sizeof(host), "%s", header) >= (int)sizeof(host))
        return false;
    if (strcmp(host, "localhost") == 0)
        return true;
    if (inet_pton(AF_INET, host, &v4) == 1)
        return (ntohl(v4.s_addr) >> 24) == 127;
    return inet_pton(AF_INET6, host, &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}
