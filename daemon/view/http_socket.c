/* See http_socket.h. */
#include "daemon/view/http_socket.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/base/state.h"
#include "daemon/view/http.h"

#define BACKLOG          64
#define STATUS_MODE      0660
#define HOST_BYTES       256
#define LOOPBACK_NETWORK 127u

/* Ours and the directory's group's: who may look need not be who may train. */
static int set_access(const struct daemon *d, const char *path, struct shd_err *e)
{
    struct stat st;
    if (stat(d->runtime_dir, &st) != 0)
        return err_sys(e, SHD_EIO, "look at '%s'", d->runtime_dir);
    if (st.st_gid != getegid() && chown(path, (uid_t)-1, st.st_gid) != 0)
        log_warn("op=http path=%s why=\"give it to group %u: %s\" do=\"chgrp it, or members of the "
                 "group cannot read the status\"",
                 path, (unsigned)st.st_gid, strerror(errno));
    if (chmod(path, STATUS_MODE) != 0)
        return err_sys(e, SHD_EIO, "set the mode of '%s'", path);
    return SHD_OK;
}

int http_listen_unix(struct http *h, int *ret_fd, struct shd_err *e)
{
    const struct daemon *d = h->daemon;
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    char path[sizeof h->path];
    const int bytes = snprintf(path, sizeof path, "%s/%s.status", d->runtime_dir, d->device);
    if (bytes < 0 || (size_t)bytes >= sizeof address.sun_path)
        return err_set(e, SHD_EINVAL, "socket path '%s' is longer than %zu bytes", path,
                       sizeof address.sun_path - 1);
    memcpy(address.sun_path, path, (size_t)bytes);
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return err_sys(e, SHD_EIO, "make a socket");
    unlink(path); /* the device lock is ours: a file here is stale */
    int r = SHD_OK;
    if (bind(fd, (const struct sockaddr *)&address, sizeof address) != 0)
        r = err_sys(e, SHD_EIO, "bind '%s'", path);
    if (r == SHD_OK) {
        memcpy(h->path, path, sizeof path); /* ours to remove from here on */
        r = set_access(d, path, e);
    }
    if (r == SHD_OK && listen(fd, BACKLOG) != 0)
        r = err_sys(e, SHD_EIO, "listen on '%s'", path);
    if (r != SHD_OK) {
        close(fd);
        return r;
    }
    *ret_fd = fd;
    return SHD_OK;
}

/* -- TCP ----------------------------------------------------------------------------------------
 */

struct host_port {
    char host[HOST_BYTES];
    const char *port;
};

/* "127.0.0.1:9100", "[::1]:9100", "localhost:9100". */
static int parse_address(const char *address, struct host_port *ret, struct shd_err *e)
{
    const char *colon = strrchr(address, ':');
    const bool brackets = address[0] == '[' && colon != NULL && colon > address && colon[-1] == ']';
    const size_t bytes = colon != NULL ? (size_t)(colon - address) : 0;
    if (bytes == 0 || bytes >= sizeof ret->host || colon[1] == '\0')
        return err_set(
            e, SHD_EINVAL,
            "--status-address '%s' is not HOST:PORT, as '127.0.0.1:9464' or '[::1]:9464'", address);
    snprintf(ret->host, sizeof ret->host, "%.*s", (int)(brackets ? bytes - 2 : bytes),
             address + brackets);
    ret->port = colon + 1;
    return SHD_OK;
}

static bool is_loopback(const struct sockaddr *sa)
{
    if (sa->sa_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)sa)->sin_addr.s_addr) >> 24 == LOOPBACK_NETWORK;
    return sa->sa_family == AF_INET6 &&
           IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)sa)->sin6_addr);
}

static int listen_at(const struct addrinfo *info, const char *address, int *ret_fd,
                     struct shd_err *e)
{
    const int on = 1;
    const int fd = socket(info->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return err_sys(e, SHD_EIO, "make a socket for '%s'", address);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, info->ai_addr, info->ai_addrlen) != 0 || listen(fd, BACKLOG) != 0) {
        const int r = err_sys(e, SHD_EIO, "listen on --status-address '%s'", address);
        close(fd);
        return r;
    }
    *ret_fd = fd;
    return SHD_OK;
}

int http_listen_tcp(const char *address, int *ret_fd, bool *ret_loopback, struct shd_err *e)
{
    const struct addrinfo hints = { .ai_socktype = SOCK_STREAM,
                                    .ai_flags = AI_PASSIVE | AI_NUMERICSERV };
    struct addrinfo *info = NULL;
    struct host_port at = { 0 };
    int r = parse_address(address, &at, e);
    if (r != SHD_OK)
        return r;
    const int failed = getaddrinfo(at.host, at.port, &hints, &info);
    if (failed != 0)
        return err_set(e, SHD_EINVAL, "--status-address '%s': %s", address, gai_strerror(failed));
    r = listen_at(info, address, ret_fd, e);
    *ret_loopback = is_loopback(info->ai_addr);
    freeaddrinfo(info);
    if (r == SHD_OK && !*ret_loopback)
        log_warn("op=http address=%s why=\"others can read names, pids and progress there\" "
                 "do=\"use a loopback address, or a firewall\"",
                 address);
    return r;
}
