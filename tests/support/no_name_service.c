/* For LD_PRELOAD: lookups of names fail. The library writes each lookup as a line to the file $ASYNCRL_NAME_QUERIES. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int unanswered(const char *call, const char *name) {
    FILE *queries = fopen(getenv("ASYNCRL_NAME_QUERIES"), "a");
    fprintf(queries, "%s %s\n", call, name);
    fclose(queries);
    return EAI_AGAIN;
}

static int is_number(const char *name) {
    unsigned char address[sizeof(struct in6_addr)];
    return !name || inet_pton(AF_INET, name, address) == 1 || inet_pton(AF_INET6, name, address) == 1;
}

int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
    int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **) = dlsym(RTLD_NEXT, "getaddrinfo");
    return is_number(name) ? real(name, service, hints, found) : unanswered("getaddrinfo", name);
}

int getnameinfo(const struct sockaddr *address, socklen_t size, char *host, socklen_t host_size, char *service,
                socklen_t service_size, int flags) {
    int (*real)(const struct sockaddr *, socklen_t, char *, socklen_t, char *, socklen_t, int) =
        dlsym(RTLD_NEXT, "getnameinfo");
    if ((flags & NI_NUMERICHOST) || !host)
        return real(address, size, host, host_size, service, service_size, flags);
    return unanswered("getnameinfo", "of an address");
}

struct hostent *gethostbyname(const char *name) {
    unanswered("gethostbyname", name);
    return NULL;
}

struct hostent *gethostbyaddr(const void *address, socklen_t size, int type) {
    unanswered("gethostbyaddr", "of an address");
    return NULL;
}
