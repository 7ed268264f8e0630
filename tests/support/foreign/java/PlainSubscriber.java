import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;

import org.zeromq.SocketType;
import org.zeromq.ZContext;
import org.zeromq.ZMQ;

/**
 * A plain subscriber of a proxy in Java: topic, id and value of each message, a line each.
 *
 * Arguments: endpoint, topic, how many messages.
 */
public class PlainSubscriber {
    public static void main(String[] arguments) {
        int count = Integer.parseInt(arguments[2]);
        ZContext context = new ZContext();
        ZMQ.Socket socket = context.createSocket(SocketType.SUB);
        // One connection in a hundred of JeroMQ 0.6.0 never shakes hands; after this it is made anew, not after 30 s.
        socket.setHandshakeIvl(3000);
        socket.subscribe(arguments[1].getBytes(StandardCharsets.UTF_8));
        socket.connect(arguments[0]);
        for (int i = 0; i < count; i++) {
            String topic = socket.recvStr();
            long id = ByteBuffer.wrap(socket.recv()).getLong();
            System.out.println(topic + " " + id + " " + socket.recvStr());
            if (socket.hasReceiveMore()) {
                throw new IllegalStateException("more than three frames");
            }
        }
        System.out.flush();
        context.close();
    }
}
