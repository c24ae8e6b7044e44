/* Listening sockets: HOST:PORT in two, what may be reached from elsewhere, files left by the dead.
 */
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/share/listen.h"
#include "tests/lib/test.h"

TEST(host_and_port_are_split)
{
    static const struct {
        const char *text, *host, *port; /* host NULL: it is none */
    } cases[] = {
        { "127.0.0.1:80", "127.0.0.1", "80" },
        { "[::1]:0", "::1", "0" },
        { "node1:9464", "node1", "9464" },
        { "nonsense", NULL, NULL },
        { ":80", NULL, NULL },
        { "host:", NULL, NULL },
        { "[]:80", NULL, NULL },
        { "[::1:80", NULL, NULL },
        { "", NULL, NULL },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        char host[LISTEN_HOST_BYTES] = "";
        const char *port = NULL;
        EXPECT_EQ(listen_split(cases[i].text, host, &port), cases[i].host != NULL);
        if (cases[i].host == NULL)
            continue;
        EXPECT_STR(host, cases[i].host);
        EXPECT_STR(port, cases[i].port);
    }
    static char longest[LISTEN_HOST_BYTES + 8];
    char host[LISTEN_HOST_BYTES];
    const char *port;
    memset(longest, 'a', LISTEN_HOST_BYTES);
    memcpy(longest + LISTEN_HOST_BYTES, ":80", 4);
    EXPECT(!listen_split(longest, host, &port));
}

TEST(tcp_stays_on_this_machine_without_leave)
{
    struct shd_err e = { 0 };
    char name[LISTEN_NAME_BYTES];
    int fd = -1;
    bool remote = true;
    EXPECT_OK(listen_tcp("localhost:0", 0, &fd, &remote, &e), &e);
    EXPECT(!remote);
    EXPECT_OK(listen_name(fd, name, &e), &e);
    EXPECT_HAS(name, "127.0.0.1:");
    int second;
    EXPECT_STATUS(listen_tcp(name, 0, &second, &remote, &e), SHD_EBUSY);
    close(fd);
    EXPECT_STATUS(listen_tcp("0.0.0.0:0", 0, &fd, &remote, &e), SHD_EAUTH);
    EXPECT_OK(listen_tcp("0.0.0.0:0", LISTEN_REMOTE, &fd, &remote, &e), &e);
    EXPECT(remote);
    close(fd);
    EXPECT_STATUS(listen_tcp("no-address:80", 0, &fd, &remote, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "is no numeric address and port");
    EXPECT_STATUS(listen_tcp("80", 0, &fd, &remote, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "'80' is not HOST:PORT");
}

TEST(socket_file_is_private_and_a_dead_ones_is_replaced)
{
    char dir[] = "/tmp/test_listen.XXXXXX", path[64], longest[200];
    struct shd_err e = { 0 };
    struct stat st;
    int fd, second;
    CHECK(mkdtemp(dir) != NULL);
    snprintf(path, sizeof path, "%s/socket", dir);
    EXPECT_OK(listen_unix(path, &fd, &e), &e);
    EXPECT(stat(path, &st) == 0 && (st.st_mode & 0777) == 0600);
    EXPECT_STATUS(listen_unix(path, &second, &e), SHD_EBUSY);
    close(fd); /* its file stays */
    EXPECT_OK(listen_unix(path, &fd, &e), &e);
    close(fd);
    unlink(path);
    fclose(fopen(path, "w"));
    EXPECT_STATUS(listen_unix(path, &fd, &e), SHD_EIO); /* what is no socket is not removed */
    EXPECT(access(path, F_OK) == 0);
    unlink(path);
    rmdir(dir);
    memset(longest, 'a', sizeof longest - 1);
    longest[sizeof longest - 1] = '\0';
    EXPECT_STATUS(listen_unix(longest, &fd, &e), SHD_ERANGE);
}

TEST(hosts_of_this_machine_are_known_by_name)
{
    EXPECT(listen_host_is_local("localhost") && listen_host_is_local("localhost:8440"));
    EXPECT(listen_host_is_local("127.0.0.1:80") && listen_host_is_local("[::1]:80"));
    EXPECT(!listen_host_is_local("evil.example:8440") && !listen_host_is_local("10.0.0.1:80"));
    EXPECT(!listen_host_is_local("localhost.evil.example"));
}

TEST_MAIN()
